"""Runs that are killed and go on: the same samples, the same losses to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.plan_log import audit, read_plan_log
from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist

NUM_STEPS, BATCH, SEED = 8, 8, 7
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01, "warmup_type": "linear"},
}


class Run:
    """Launches of one training run, in one output folder."""

    def __init__(self, demo: Any, out: Path, profile: Path, **top: Any) -> None:
        self.out, self.num_launches = out, 0
        out.mkdir()
        block = {
            "train": {
                "num_steps": NUM_STEPS,
                "output_dir": str(out),
                "save_every": 2,
                "keep_last": 2,
                "resume": "auto",
            },
            "telemetry": {"plan_log": str(out / "plans.jsonl")},
            "data": {"num_workers": 1},
            "cost": {"profile": str(profile) if profile.exists() else "auto"},
        }
        top = {"train_batch_size": BATCH, "optimizer": ADAM, "scheduler": WARMUP, **top}
        (out / "config.json").write_text(json.dumps(ds_config(demo_paths(demo), out, block, **top)))

    def launch(self, strike: dict[str, Any] | None = None, expect: int = 0) -> list[list[int]]:
        """Train until the end or the strike; the samples that each rank loaded, in order."""
        self.num_launches += 1
        folder = self.out / f"launch{self.num_launches}"
        arguments = {"config_path": str(self.out / "config.json"), "strike": strike}
        run_ranks("interrupted", arguments, folder, expect=expect)
        return [[int(i) for i in (folder / f"loaded{rank}").read_text().split()] for rank in (0, 1)]

    @property
    def losses(self) -> list[tuple[int, float]]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    @property
    def latest(self) -> str:
        return (self.out / "checkpoints" / "latest").read_text()


def samples(step: int) -> set[int]:
    """What the global batch of a step (from 1) holds, by the order alone."""
    return set(EpochOrder(24, BATCH, seed=SEED).batch(step - 1).positions.tolist())


def test_killed_stopped_and_killed_again(tiny_demo: Any, tmp_path: Path) -> None:
    profile = tmp_path / "whole" / "profile.json"
    whole = Run(tiny_demo, tmp_path / "whole", profile)
    whole.launch()
    assert [step for step, _ in whole.losses] == list(range(1, NUM_STEPS + 1))

    run = Run(tiny_demo, tmp_path / "broken", profile)
    num_files = len(list((whole.out / "checkpoints" / "global_step8").glob("*.pt")))
    # Rank 0 writes about half of the files: the second checkpoint is being written.
    run.launch({"signal": "SIGKILL", "ranks": [0, 1], "file": num_files // 2 + 3}, expect=-9)
    assert run.latest == "global_step2"
    assert [path.name for path in (run.out / "checkpoints").glob("*4")] == [".saving-global_step4"]

    # One rank alone is told to stop: both finish a step, save and leave in good order.
    loaded = run.launch({"signal": "SIGTERM", "ranks": [1], "step": 3})
    stopped = int(run.latest.removeprefix("global_step"))
    assert stopped in (5, 6)
    assert not list((run.out / "checkpoints").glob(".*"))
    assert run.losses == whole.losses[:stopped]
    for rank in loaded:
        for number, step in enumerate(range(3, stopped + 1)):
            assert set(rank[number * BATCH : (number + 1) * BATCH]) == samples(step)

    run.launch({"signal": "SIGKILL", "ranks": [0, 1], "step": 7 - stopped}, expect=-9)
    run.launch()
    assert run.losses == whole.losses
    for out in (whole.out, run.out):
        names = {path.name for path in (out / "checkpoints").iterdir()}
        assert names == {"latest", "global_step6", "global_step8"}
    logs = [read_plan_log(out / "plans.jsonl") for out in (whole.out, run.out)]
    assert [step.line["sample_ids"] for step in logs[0]] == [step.line["sample_ids"] for step in logs[1]]
    assert audit(logs[1]).problems == ()
    for step in logs[1][:NUM_STEPS]:  # once by each of both ranks
        assert [line["stage"] for line in step.measured] == [0, 1]
