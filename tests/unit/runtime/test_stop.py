"""Signals, the random state and the log of a resumed run."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch

from dflop_ds.runtime import random_state
from dflop_ds.runtime.report import PlanLog, forget_other_ranks, open_rank_log
from dflop_ds.runtime.stop import leave_signals_to_rank, on_signals
from dflop_ds.scheduling.plan_log import rank_log


def test_signals_ask_for_an_end_and_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    asked = []
    with on_signals(lambda: asked.append(1)):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert len(asked) == 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_data_workers_leave_signals_to_a_rank_that_handles_them() -> None:
    # A process that was started in the background may have inherited an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        leave_signals_to_rank(0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with on_signals(lambda: None):
            leave_signals_to_rank(0)
            assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_random_numbers_go_on_where_they_were() -> None:
    def draw() -> tuple:
        python, numpy = (random.random(), random.gauss(0, 1)), (np.random.rand(), np.random.normal())
        return python, numpy, torch.rand(3).tolist()

    random.gauss(0, 1), np.random.normal()  # leaves a cached number behind
    state = json.loads(json.dumps(random_state.capture(torch.device("cpu"))))
    first = draw()
    draw()
    random_state.restore(state, torch.device("cpu"))
    assert draw() == first


def test_the_plan_log_of_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    lines = [{"type": kind, "step": step} for step in range(4) for kind in ("plan", "measured")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = PlanLog(path, {})
    assert len(path.read_text().splitlines()) == 8
    log.keep(num_planned=3, num_measured=1)
    log._write({"type": "plan", "step": 3})
    kept = [(line["type"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]
    assert kept == [("plan", 0), ("measured", 0), ("plan", 1), ("plan", 2), ("plan", 3)]
    PlanLog(path, {})._write({"type": "plan", "step": 0})
    assert len(path.read_text().splitlines()) == 1


def test_a_rank_that_cannot_write_its_log_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert open_rank_log(tmp_path / "file" / "plans.rank1.jsonl") is None
    assert open_rank_log(tmp_path / "folder" / "plans.rank1.jsonl") is not None


def test_logs_of_ranks_that_are_no_more_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    for rank in range(4):
        rank_log(path, rank).write_text("")
    forget_other_ranks(path, world_size=2)
    assert [rank_log(path, rank).exists() for rank in range(4)] == [True, True, False, False]
