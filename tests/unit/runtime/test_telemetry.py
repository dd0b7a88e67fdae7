"""Step summaries by hand, and recording on an engine that only dispatches."""

from __future__ import annotations

import time
import types
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule

from dflop_ds.runtime.telemetry import (
    InstructionRecord,
    StepRecord,
    Telemetry,
    summarise,
    trace_events,
)


def _step(start_s: float, duration_s: float, *bars: tuple[str, int, float, float]) -> StepRecord:
    return StepRecord(start_s, duration_s, [InstructionRecord(*bar) for bar in bars])


# Two stages, two microbatches. Clock of the machine:
#   rank 0: F0 100-101, F1 101-104, B0 106-108, B1 110-114, optimizer until 116
#   rank 1: F0 101.5-102.5, B0 102.5-105.5, F1 106-107, B1 107-109
STEPS = {
    0: _step(
        99.0,
        17.0,
        ("LoadMicroBatch", 0, 0.5, 0.5),
        ("ForwardPass", 0, 1.0, 1.0),
        ("ForwardPass", 1, 2.0, 3.0),
        ("RecvGrad", 0, 5.0, 2.0),
        ("BackwardPass", 0, 7.0, 2.0),
        ("BackwardPass", 1, 11.0, 4.0),
        ("OptimizerStep", 0, 16.0, 1.0),
    ),
    1: _step(
        101.0,
        15.5,
        ("ForwardPass", 0, 0.5, 1.0),
        ("BackwardPass", 0, 1.5, 3.0),
        ("ForwardPass", 1, 5.0, 1.0),
        ("BackwardPass", 1, 6.0, 2.0),
    ),
}


def test_summary_by_hand() -> None:
    summary = summarise(STEPS)
    assert summary.step_time_s == 17.0
    assert summary.makespan_s == pytest.approx(114.0 - 100.0), "first forward to last backward"
    assert summary.busy_s == pytest.approx({0: 10.0, 1: 7.0})
    assert summary.bubble_fraction == pytest.approx(1.0 - 17.0 / (2 * 14.0))
    # Rank 0: 3 and 7 s, largest over mean 7 / 5; rank 1: 4 and 3 s, 4 / 3.5.
    assert summary.stage_imbalance == pytest.approx((7.0 / 5.0 + 4.0 / 3.5) / 2)


def test_only_forward_and_backward_count_as_compute() -> None:
    names = [record.name for record in STEPS[0].compute()]
    assert names == ["ForwardPass", "ForwardPass", "BackwardPass", "BackwardPass"]


def test_a_single_rank_that_never_waits_has_no_bubble() -> None:
    step = _step(5.0, 3.0, ("ForwardPass", 0, 0.0, 1.0), ("BackwardPass", 0, 1.0, 2.0))
    summary = summarise({0: step})
    assert (summary.bubble_fraction, summary.stage_imbalance, summary.makespan_s) == (0.0, 1.0, 3.0)


def test_trace_starts_with_the_earliest_rank() -> None:
    events = trace_events(STEPS, stage_of=lambda rank: 10 + rank, replica_of=lambda rank: 20 + rank)
    assert len(events) == 7 + 4
    found = {(event.stage, event.name, event.microbatch): event for event in events}
    first = found[10, "ForwardPass", 0]
    assert (first.replica, first.start_s, first.duration_s) == (20, pytest.approx(1.0), 1.0)
    assert found[11, "BackwardPass", 1].start_s == pytest.approx(101.0 - 99.0 + 6.0)
    assert found[11, "BackwardPass", 1].replica == 21
    assert found[10, "OptimizerStep", 0].start_s == pytest.approx(16.0)


class _Engine:
    """Dispatches like DeepSpeed: through the class map, bound to the instance."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def _forward(self, buffer_id: int) -> None:
        time.sleep(0.02)
        self.calls.append(("forward", buffer_id))

    def _backward(self, buffer_id: int) -> None:
        if buffer_id == 13:
            raise RuntimeError("no such buffer")
        self.calls.append(("backward", buffer_id))

    def _reduce(self) -> None:
        self.calls.append(("reduce", None))

    _INSTRUCTION_MAP = {  # noqa: RUF012
        schedule.ForwardPass: _forward,
        schedule.BackwardPass: _backward,
        schedule.ReduceGrads: _reduce,
    }

    def run(self, *commands: Any) -> None:
        for command in commands:
            types.MethodType(self._INSTRUCTION_MAP[type(command)], self)(**command.kwargs)


def test_instructions_of_a_step_are_recorded() -> None:
    engine = _Engine()
    telemetry = Telemetry.attach(engine)
    before_s = time.perf_counter()
    with telemetry.step():
        engine.run(
            schedule.ForwardPass(0),
            schedule.ForwardPass(1),
            schedule.BackwardPass(0),
            schedule.ReduceGrads(),
        )
    after_s = time.perf_counter()
    assert engine.calls == [("forward", 0), ("forward", 1), ("backward", 0), ("reduce", None)]
    (step,) = telemetry.steps
    assert [(record.name, record.microbatch) for record in step.instructions] == [
        ("ForwardPass", 0),
        ("ForwardPass", 1),
        ("BackwardPass", 0),
        ("ReduceGrads", 0),
    ]
    assert all(record.duration_s >= 0.02 for record in step.instructions[:2])
    assert before_s <= step.start_s <= step.start_s + step.duration_s <= after_s
    end_s = 0.0
    for record in step.instructions:
        assert end_s <= record.start_s
        end_s = record.start_s + record.duration_s
    assert 0.04 <= end_s <= step.duration_s


def test_microbatches_are_counted_anew_in_every_step() -> None:
    engine = _Engine()
    telemetry = Telemetry.attach(engine)
    for _ in range(2):
        with telemetry.step():
            engine.run(schedule.BackwardPass(1), schedule.BackwardPass(0))
    assert [[r.microbatch for r in step.instructions] for step in telemetry.steps] == [[0, 1], [0, 1]]


def test_class_map_and_other_engines_are_untouched() -> None:
    before = dict(_Engine._INSTRUCTION_MAP)
    engine, other = _Engine(), _Engine()
    telemetry = Telemetry.attach(engine)
    assert before == _Engine._INSTRUCTION_MAP
    assert set(engine._INSTRUCTION_MAP) == set(before)
    with telemetry.step():
        other.run(schedule.BackwardPass(0))
    assert other.calls == [("backward", 0)]
    assert telemetry.steps[0].instructions == []


def test_nothing_is_recorded_outside_a_step() -> None:
    engine = _Engine()
    telemetry = Telemetry.attach(engine)
    engine.run(schedule.BackwardPass(0))
    assert not telemetry.steps
    with telemetry.step():
        engine.run(schedule.BackwardPass(1))
    engine.run(schedule.BackwardPass(2))
    assert engine.calls == [("backward", 0), ("backward", 1), ("backward", 2)]
    assert [len(step.instructions) for step in telemetry.steps] == [1]


def test_an_exception_in_a_step_reaches_the_caller_and_the_next_step_is_whole() -> None:
    engine = _Engine()
    telemetry = Telemetry.attach(engine)
    with pytest.raises(RuntimeError, match="no such buffer"), telemetry.step():
        engine.run(schedule.BackwardPass(0), schedule.BackwardPass(13))
    engine.run(schedule.BackwardPass(5))
    assert not telemetry.steps
    with telemetry.step():
        engine.run(schedule.BackwardPass(1))
    (step,) = telemetry.steps
    assert [(record.name, record.microbatch) for record in step.instructions] == [("BackwardPass", 0)]
