"""Every family: what ``save_pretrained`` wrote is loaded, and what is exported is loaded by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from benchmarks.parity import internvl, qwen2_5_vl, qwen2_audio
from dflop_ds.families import family_of
from dflop_ds.models.export import HuggingFaceWriter, whole_model_shapes
from dflop_ds.models.weights import Checkpoint, check_weights, load_layers, named_weights

CONFIGS = {
    "internvl": internvl.make_config,
    "qwen2_audio": qwen2_audio.make_config,
    "qwen2_5_vl": qwen2_5_vl.make_config,
}


@pytest.mark.parametrize("family_name", CONFIGS)
def test_there_and_back(family_name: str, tmp_path: Path, caplog: Any) -> None:
    config = CONFIGS[family_name]()
    model = AutoModelForMultimodalLM.from_config(config)
    model.save_pretrained(tmp_path / "source")
    family = family_of(json.loads(config.to_json_string(use_diff=False)))
    layers = [plan.build() for plan in family.pipeline_layers(config)]
    source = Checkpoint(tmp_path / "source", family.published_names)
    check_weights(layers, source, also_known=whole_model_shapes(config))
    assert "no place for" not in caplog.text
    load_layers(layers, source)
    state = model.state_dict()
    weights = {name: p.detach() for layer in layers for name, p in named_weights(layer).items()}
    for name, value in weights.items():
        assert torch.equal(value, state[name]), name

    trained = {name: value + 0.25 for name, value in weights.items()}
    out = tmp_path / "out"
    out.mkdir()
    shapes = [{name: tuple(value.shape) for name, value in trained.items()}]
    options = {"published_names": family.published_names, "max_shard_bytes": 20_000}
    writer = HuggingFaceWriter(out, tmp_path / "source", config, shapes, torch.float32, **options)
    writer.write_stage(0, trained.__getitem__)
    writer.write_rest()
    read, info = type(model).from_pretrained(out, output_loading_info=True)
    assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
    exported = read.state_dict()
    for name, value in state.items():
        assert torch.equal(exported[name], trained.get(name, value)), name
