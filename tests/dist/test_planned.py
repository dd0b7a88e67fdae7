"""What `dflop-ds plan` writes is what the engine runs."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.cli.main import main
from dflop_ds.config import load_ds_config
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.probe import probe
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist


def test_training_takes_stages_and_microbatches_from_the_plan(tiny_demo: Any, tmp_path: Path) -> None:
    dataset = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    probe(dataset, max_tokens=9000, progress=False).table.save(tmp_path / "shapes.npz")
    config = ds_config(demo_paths(tiny_demo), tmp_path)
    del config["train_micro_batch_size_per_gpu"]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = ["--gpus", "2", "--hardware", "cpu", "--min-stages", "2", "--out", str(tmp_path / "plan.json")]
    assert main(["plan", str(tmp_path / "ds.json"), "--shapes", str(tmp_path / "shapes.npz"), *options]) == 0
    plan = load_ds_config(tmp_path / "plan.json")
    sizes = plan["dflop"]["parallel"]["split"]
    assert len(sizes) == 2

    results = run_ranks("planned", {"plan": str(tmp_path / "plan.json"), "num_steps": 2}, tmp_path / "run")
    for result in results:
        assert result["parts"] == [0, *itertools.accumulate(sizes)]
        assert result["num_microbatches"] == plan["gradient_accumulation_steps"]
        assert result["train_batch_size"] == plan["train_batch_size"] == 8
        assert result["zero_stage"] == plan["zero_optimization"]["stage"]
        assert all(math.isfinite(loss) for loss in result["losses"])
