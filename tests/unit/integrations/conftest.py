"""A small mixed data set, costs in a file, and a clock that only the model moves."""

from __future__ import annotations

import json

import pytest

from benchmarks.hf_data import SyntheticSamples
from dflop_ds.integrations import hf_calibration
from tests.support.hf import COST, NUM_SAMPLES, build, make_samples


@pytest.fixture(scope="module")
def config():
    return build()


@pytest.fixture(scope="module")
def dataset(config):
    return SyntheticSamples(make_samples("mixed", NUM_SAMPLES), config)


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST))
    return str(path)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only a forward pass moves: by 1 ms, 20 us per token and 3 ms per tile."""
    now_s = [0.0]
    monkeypatch.setattr(hf_calibration, "_now", lambda: now_s[0])

    def work(module, args, kwargs, output):
        pixels = kwargs.get("pixel_values")
        tiles = 0 if pixels is None else int((pixels.abs().sum(dim=(2, 3, 4)) > 0).sum())
        now_s[0] += 1e-3 + 2e-5 * kwargs["input_ids"].numel() + 3e-3 * tiles

    return lambda trainer: trainer.model.register_forward_hook(work, with_kwargs=True)
