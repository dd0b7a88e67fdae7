"""A family from outside the package: registered by importing one file, and used like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.probe import probe
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import family_of, import_families, model_dims
from dflop_ds.models.attention import SEGMENTS_NAME
from tests.support.model_dirs import write_toy_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy"))


def _data(model_dir: Path, folder: Path) -> LlavaDataset:
    rng = np.random.default_rng(0)
    records: list[dict[str, Any]] = []
    for number, height in enumerate([5, 40, 100, 16 * 40, 16 * 40 + 1]):
        Image.fromarray(rng.integers(0, 256, (height, 20, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        turns = [{"from": "human", "value": "<image> is what?"}, {"from": "gpt", "value": "A band."}]
        records.append({"id": f"s{number}", "image": f"{number}.png", "conversations": turns})
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    records.append({"id": "text", "conversations": turns})
    (folder / "records.json").write_text(json.dumps(records))
    return from_pretrained_dir(model_dir, folder / "records.json", media_root=folder)


def test_data_layers_and_gradients(model_dir: Path, tmp_path: Path) -> None:
    data = _data(model_dir, tmp_path)
    found = probe(data, max_tokens=1000, broken="drop")
    assert found.table.num_tiles.tolist() == [1, 3, 7, 40, 0]
    assert [dropped.sample_id for dropped in found.dropped] == ["s4"]

    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    plans = family_of(config.to_dict()).pipeline_layers(config, attention=SEGMENTS_NAME, seed=0)
    layers = [plan.build() for plan in plans]
    collate = PackedCollator(0, row_shape=data.processor.row_shape)

    def loss(rows: list[int]) -> torch.Tensor:
        carry, (targets, weights, _) = collate([data[row] for row in rows])
        for layer in layers:
            carry = layer(carry)
        return (torch.nn.functional.cross_entropy(carry, targets, reduction="none") * weights).sum()

    rows = found.rows.tolist()
    packed = loss(rows)
    alone = sum(loss([row]) for row in rows)
    assert packed.item() == pytest.approx(alone.item(), rel=1e-5)
    packed.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for layer in layers for p in layer.parameters())
    assert model_dims(config.to_dict()).vision.hidden == config.encoder_hidden_size


def test_what_the_rule_refuses_is_named_in_the_scan(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\[4\] sample 's4'.*at most 40 bands, found 41"):
        probe(_data(model_dir, tmp_path), max_tokens=1000)


def test_modalities_that_the_family_does_not_take(model_dir: Path, tmp_path: Path) -> None:
    """A marker of one is plain text, a file is refused."""
    turns = [{"from": "human", "value": "what does <video> mean?"}, {"from": "gpt", "value": "A tag."}]
    records: list[dict[str, Any]] = [{"id": "tag", "conversations": turns}]
    records.append({"id": "film", "video": "a.mp4", "conversations": turns})
    (tmp_path / "records.json").write_text(json.dumps(records))
    data = from_pretrained_dir(model_dir, tmp_path / "records.json", media_root=tmp_path)
    assert "<video>" in data.tokenizer.decode(data[0].input_ids)
    with pytest.raises(DataError, match=r"'film'.*among \['image'\] for this model, found video files"):
        data.shape(1)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"family_module must name a module.*'no_such_family'"):
        import_families("no_such_family")
