"""Fixtures that several test folders share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from dflop_ds.data.demo import DemoPaths, build_demo
from dflop_ds.data.demo_model import TinyModelDims

# A busy machine may take any time for an example.
settings.register_profile("dflop_ds", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dflop_ds")

TINY_DIMS = TinyModelDims(
    grid_side=3,
    vision_hidden=32,
    vision_intermediate=48,
    vision_layers=2,
    vision_heads=2,
    text_hidden=48,
    text_intermediate=64,
    text_layers=2,
    text_heads=4,
    text_kv_heads=2,
)


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """Demo data of 24 samples and a tiny model with random weights; do not write into it."""
    return build_demo(tmp_path_factory.mktemp("tiny_demo"), num_samples=24, dims=TINY_DIMS, with_weights=True)
