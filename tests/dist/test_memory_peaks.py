"""Predicted peak bytes of both stages against the live tensors of a real training step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.cost.memory import MemoryModel, TrainingSetting
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.probe import probe
from dflop_ds.flops import ModelDims
from dflop_ds.profiling.table import ProfileTable
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist

SETTINGS = {
    "fp32": ({}, False, TrainingSetting()),
    "fp32 checkpointed": ({}, True, TrainingSetting(activation_checkpointing=True)),
    "bf16 zero-1": (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}},
        False,
        TrainingSetting(value_bytes=2, zero_stage=1, reduce_bucket_values=100_000),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_needs_what_was_predicted(tiny_demo: Any, tmp_path: Path, name: str) -> None:
    top, checkpointing, setting = SETTINGS[name]
    block = {
        "parallel": {"pipeline_stages": 2, "activation_checkpointing": checkpointing},
        "scheduler": {"policy": "blind"},  # microbatches that do not depend on this machine's times
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = ds_config(demo_paths(tiny_demo), tmp_path, block, optimizer=optimizer, **top)
    reports = run_ranks("memory", {"config": config}, tmp_path)
    profile = ProfileTable.load(tmp_path / "profile.json")
    dataset = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    table = probe(dataset, max_tokens=9000, progress=False).table
    content = AutoConfig.from_pretrained(tiny_demo.model_dir).to_json_string(use_diff=False)
    dims = ModelDims.from_hf_config(json.loads(content))
    model = MemoryModel(profile.rows, profile.parameters, dims, setting.value_bytes)
    stages = [report["kinds"] for report in reports]
    for stage, report in enumerate(reports):
        bins = report["bins"]
        whole = model.stage(stages, stage, MicrobatchFeatures.from_bins(table, bins), setting)
        # This order decides which two are in flight, or in the two buffers; the worst is predicted.
        pairs = [MicrobatchFeatures.from_bins(table, list(pair)) for pair in itertools.pairwise(bins)]
        predicted = max(model.stage(stages, stage, pair, setting).total_bytes for pair in pairs)
        assert predicted <= whole.total_bytes * (1 + 1e-9)
        lasting = whole.optimizer_bytes + whole.parameters_bytes
        if setting.value_bytes == 2:
            lasting += whole.gradients_bytes * 2 / 3  # the fp32 sums of gradients, made once
        assert predicted - lasting == pytest.approx(report["peak_bytes"], rel=0.12)
