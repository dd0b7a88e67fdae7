"""Layers cut over two ranks compute what whole layers compute, and are profiled under that cut."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo import build_demo
from dflop_ds.data.demo_model import TinyModelDims
from dflop_ds.data.probe import probe
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.profiling.table import ProfileTable
from tests.support.ranks import run_ranks


@pytest.mark.dist
def test_shares_of_layers(tmp_path):
    dims = TinyModelDims(vision_hidden=32, vision_layers=2, text_hidden=48, text_layers=2)
    demo = build_demo(tmp_path / "demo", num_samples=16, seed=3, dims=dims)
    dataset = from_pretrained_dir(demo.model_dir, demo.train_path, media_root=demo.media_root)
    table = probe(dataset, max_tokens=9000, progress=False).table
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "dflop": {
            "model": {"path": str(demo.model_dir)},
            "data": {"train_path": str(demo.train_path)},
            "train": {"num_steps": 1},
        },
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = {
        "model_dir": str(demo.model_dir),
        "train_path": str(demo.train_path),
        "index": int(table.num_tiles.argmax()),
        "config": str(path),
    }
    reports = run_ranks("sharded", arguments, tmp_path / "out")
    for report in reports:
        assert report["code"] == 0
        assert report["segments"] == [], "shared memory that would outlive the ranks"
        assert report["decisions"] == [True, False], "those of rank 0"
        assert max(report["differences"].values()) < 1e-5, report["differences"]
    profile = ProfileTable.load(tmp_path / "out" / "profile.json")
    plans = {plan.kind: plan for plan in pipeline_layers(AutoConfig.from_pretrained(demo.model_dir))}
    assert profile.fingerprint.tensor_parallel_degree == 2
    assert {row.kind for row in profile.rows} == set(plans)
    for kind, plan in plans.items():
        whole = sum(parameter.numel() for parameter in plan.build().parameters())
        assert profile.parameters[kind] == whole, "parameters of the whole layer"
    assert not list((tmp_path / "out").glob("*.partial.jsonl"))
