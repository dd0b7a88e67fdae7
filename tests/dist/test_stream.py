"""Training over a stream of ``datasets``: the loss of its global batches, and going on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.data.dataset import from_pretrained_dir
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config, reference_loss, reference_model

pytestmark = pytest.mark.dist
datasets = pytest.importorskip("datasets")

NUM_STEPS, SAVE_AT = 7, 4


@pytest.mark.parametrize("stages", [2, 1])
def test_a_stream_is_trained_and_resumed(stages: int, tiny_demo: Any, tmp_path: Path) -> None:
    """24 samples a pass in windows of 16: two steps, one step, two steps, ... of the next pass."""
    records = [json.loads(line) for line in Path(tiny_demo.train_path).read_text().splitlines()]
    for record in records:
        for key in ("image", "video"):
            value = record.get(key, [])
            record[key] = value if isinstance(value, list) else [value]
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    demo = demo_paths(tiny_demo) | {"train_path": str(tmp_path / "saved")}
    block = {
        "parallel": {"pipeline_stages": stages},
        "data": {"streaming": True, "stream_window": 2, "num_workers": 1},
        "train": {"num_steps": NUM_STEPS, "output_dir": str(tmp_path / "out")},
    }
    config = ds_config(demo, tmp_path / "out", block)
    arguments = {"config": config, "num_steps": NUM_STEPS, "checkpoints": str(tmp_path / "checkpoints")}
    whole = run_ranks("stream", {**arguments, "save_at": SAVE_AT}, tmp_path / "whole")
    resumed = run_ranks("stream", {**arguments, "resume": arguments["checkpoints"]}, tmp_path / "resumed")

    plans = whole[0]["plans"]
    trained = [sorted(number for members in bins for number in members) for bins in plans]
    assert sorted(trained[0] + trained[1]) == list(range(16)) != trained[0] + trained[1]
    assert trained[2] == list(range(16, 24))
    assert sorted(trained[3] + trained[4]) == list(range(24, 40))
    dataset = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    model = reference_model(str(tiny_demo.model_dir)).double()
    for step, numbers in enumerate(trained[:2]):
        loss = reference_loss(model, dataset, [number % 24 for number in numbers])
        assert whole[0]["losses"][step] == pytest.approx(loss.item(), rel=1e-4)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad * min(1.0, 1.0 / float(total_norm(model)))
    for rank in (0, 1):
        assert whole[rank]["type"] == "StreamDataset"
        assert whole[rank]["plans"] == plans
        assert resumed[rank]["plans"] == plans[SAVE_AT:]
        assert resumed[rank]["losses"] == whole[rank]["losses"][SAVE_AT:]
        # At most the records of the windows that are planned ahead.
        assert whole[rank]["kept"] <= 3 * 16 + 24


def total_norm(model: Any) -> float:
    return sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
