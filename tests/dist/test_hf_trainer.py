"""The Trainer callback on two ranks: DDP, and ZeRO 1 to 3 through the ``deepspeed`` launcher.

Weights after an epoch of SGD must be those of a plain loop over whole global batches in one process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.hf_data import IGNORED, SyntheticSamples, build_model
from dflop_ds.cost.microbatch_cost import MicrobatchCost
from tests.support.hf import COST, build, make_samples, plain_training
from tests.support.ranks import ROOT, WORKERS, free_port, run_ranks

pytestmark = pytest.mark.dist

REPORT = dict[str, Any]


def launch(cases: list[REPORT], out: Path, timeout_s: float = 200.0) -> list[REPORT]:
    """Run the worker through DeepSpeed's launcher on this machine."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command += ["--master_port", str(free_port()), str(WORKERS / "hf_trainer.py")]
    command.append(json.dumps({"cases": cases, "out": str(out)}))
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    with (out / "launcher.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (out / "launcher.log").read_text()[-8000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def case(name: str, out: Path, **options: Any) -> REPORT:
    profile = out / "cost.json"
    profile.write_text(json.dumps(COST))
    return {"name": name, "num_samples": 29, "config": {"profile": str(profile)}, **options}


def check(options: REPORT, reports: list[REPORT], out: Path) -> None:
    """Weights against the plain loop, and every sample once on exactly one rank."""
    config = build()
    samples = make_samples(options.get("samples", "mixed"), options["num_samples"])
    dataset = SyntheticSamples(samples, config)
    expected = plain_training(dataset, config, 2 * 2 * options.get("accumulation", 1))
    start = torch.cat([parameter.detach().flatten() for parameter in build_model(config).parameters()])
    for rank in range(2):
        found = torch.load(out / f"{options['name']}-rank{rank}.pt")
        assert float((found - expected).norm() / (expected - start).norm()) < 1e-5, options["name"]
    seen = [row for report in reports for batch in report[options["name"]]["seen"] for row in batch if row]
    known = [feature["labels"][feature["labels"] != IGNORED].tolist() for feature in dataset]
    if options.get("accepts", True):
        assert sorted(seen) == sorted(known)
    else:  # a rank without a sample trains one with weight zero, whose labels stay
        assert {tuple(row) for row in seen} == {tuple(row) for row in known}
    counts = [len(report[options["name"]]["seen"]) for report in reports]
    assert counts == [-(-options["num_samples"] // 4)] * 2


def test_ddp_equals_one_process(tmp_path: Path) -> None:
    cases = [
        case("plain", tmp_path, num_samples=13),
        case("accumulated", tmp_path, accumulation=4),
        case("mean loss", tmp_path, num_samples=13, accepts=False),
        case("mean loss accumulated", tmp_path, accumulation=4, accepts=False),
        case("packed", tmp_path, accumulation=4, collator="packed"),
        case("text on one rank", tmp_path, num_samples=14, samples="one_image", accumulation=2),
        case("measured", tmp_path, accumulation=2, measure=True),
    ]
    reports = run_ranks("hf_trainer", {"cases": cases}, tmp_path)
    for options in cases:
        check(options, reports, tmp_path)
    gains = [record.get("dflop/gain_estimate", 1.0) for record in reports[0]["accumulated"]["log"]]
    assert max(gains) > 1.01  # the order was changed


def test_ranks_that_would_train_on_different_plans_stop(tmp_path: Path) -> None:
    cases = [case("differ", tmp_path, seed_shift=1)]
    run_ranks("hf_trainer", {"cases": cases}, tmp_path, expect=1)
    for rank in range(2):
        assert "all ranks must act on the same plan of step 0" in (tmp_path / f"rank{rank}.log").read_text()


def test_what_one_rank_lacks_stops_all_of_them(tmp_path: Path) -> None:
    MicrobatchCost(1e-5, 0.0, 1e-4, 0.0).save(tmp_path / "cost0.json")
    cases = [case("one rank", tmp_path, config={"profile": str(tmp_path / "cost{rank}.json")})]
    run_ranks("hf_trainer", {"cases": cases}, tmp_path, expect=1)
    first, second = ((tmp_path / f"rank{rank}.log").read_text() for rank in range(2))
    assert "every rank must be able to prepare the callback, ranks [1] could not" in first
    assert "cost1.json" in second


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_equals_one_process(stage: int, tmp_path: Path) -> None:
    cases = [
        case("accumulated", tmp_path, accumulation=4, zero=stage),
        case("text on one rank", tmp_path, num_samples=14, samples="one_image", accumulation=2, zero=stage),
    ]
    reports = launch(cases, tmp_path)
    for options in cases:
        check(options, reports, tmp_path)


def test_resume_under_zero_2_continues_the_same_order(tmp_path: Path) -> None:
    whole = case("whole", tmp_path, accumulation=2, zero=2, save_steps=6, arguments={"num_train_epochs": 2})
    again = {**whole, "name": "again", "resume": str(tmp_path / "whole" / "checkpoint-6")}
    reports = launch([whole, again], tmp_path)
    for rank in range(2):
        # Four steps of eight batches in an epoch: the checkpoint lies two steps into the second one.
        assert reports[rank]["again"]["seen"] == reports[rank]["whole"]["seen"][8 + 4 :]
        assert reports[rank]["again"]["progress"] == reports[rank]["whole"]["progress"]
        found = [torch.load(tmp_path / f"{name}-rank{rank}.pt") for name in ("whole", "again")]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
