"""Windows of a stream: every sample once per pass, windows that end with a pass, state of the window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflop_ds.errors import DataError
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.scheduling.windows import StreamPlanner
from dflop_ds.shapes import SampleShape, ShapeTable


class Shapes:
    """A stream of `size` samples per pass, of which every `drop`-th is not usable."""

    def __init__(self, size: int, drop: int = 0, number: int = 0) -> None:
        self.size, self.drop, self.number, self.pass_number = size, drop, number, number // size

    def state(self) -> dict[str, Any]:
        return {"number": self.number}

    def next_shape(self, pass_number: int) -> tuple[int, SampleShape | None] | None:
        if self.pass_number != pass_number:
            return None
        if self.number == self.size * (self.pass_number + 1):
            self.pass_number += 1
            return None
        number, self.number = self.number, self.number + 1
        usable = not self.drop or number % self.drop
        return number, SampleShape(f"s{number}", 0, 0, 10, 10, 5) if usable else None


def planner(
    stream: Any, *, window: int = 3, tail: str = "partial", shuffle: bool = True, num_replicas: int = 2
) -> StreamPlanner:
    def make(table: ShapeTable, rows: Any) -> StepPlanner:
        order = EpochOrder(len(table), 4, seed=5, shuffle=shuffle, tail=tail)
        return StepPlanner(table, rows, order, 2, 2, 1, costs=None, policy="blind")

    order = EpochOrder(window * 4, 4, 5, shuffle, tail)
    return StreamPlanner(stream, order, make, num_replicas, 2, num_kept_steps=4)


def numbers(planned: Any) -> list[int]:
    return sorted(number for members in planned.plan.bins for number in members)


def test_every_sample_once_per_pass_and_no_window_holds_two() -> None:
    stream = planner(Shapes(26))
    steps = [stream.plan(step) for step in range(16)]
    # Passes of 26: windows of 12, 12 and 2 samples; 3 + 3 + 1 steps.
    assert [len(numbers(step)) for step in steps[:8]] == [4, 4, 4, 4, 4, 4, 2, 4]
    assert [step.plan.step for step in steps] == list(range(16))
    assert [step.plan.epoch for step in steps[:10]] == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3]
    for first in (0, 7):
        trained = [number for step in steps[first : first + 7] for number in numbers(step)]
        assert sorted(trained) == list(range(26 * first // 7, 26 * first // 7 + 26))
    window = [number for step in steps[:3] for members in step.plan.bins for number in members]
    assert sorted(window) == list(range(12)) != window
    second = [number for step in steps[3:6] for members in step.plan.bins for number in members]
    assert [number - 12 for number in second] != window, "every window is shuffled anew"


def test_without_shuffling_and_without_tails() -> None:
    stream = planner(Shapes(14), tail="drop", shuffle=False)
    assert [numbers(stream.plan(step))[0] for step in range(6)] == [0, 4, 8, 14, 18, 22]
    assert stream.fewest_microbatches(3) == 6
    assert planner(Shapes(14)).fewest_microbatches(3) == 3


def test_unusable_samples_are_passed_over() -> None:
    stream = planner(Shapes(24, drop=3))
    trained = [number for step in range(4) for number in numbers(stream.plan(step))]
    assert sorted(trained) == [number for number in range(24) if number % 3]
    assert stream.names == {number: f"s{number}" for number in range(24) if number % 3}
    with pytest.raises(DataError, match="must hold usable samples"):
        planner(Shapes(8, drop=1)).plan(0)


@pytest.mark.parametrize("step", [0, 2, 3, 6, 7])
def test_a_run_goes_on_from_the_window_of_a_step(step: int) -> None:
    whole = planner(Shapes(26))
    expected = [whole.plan(number) for number in range(12)][step:]
    first = planner(Shapes(26))
    for number in range(step + 4):
        first.plan(number)
    state = first.state(step)
    again = planner(Shapes(26, number=state["records"]["number"]))
    again.restore(state)
    assert all(again.accepts(one.plan) for one in expected)
    other = planner(Shapes(26), num_replicas=1)
    assert not any(other.accepts(one.plan) for one in expected)
    found = [again.fallback(number) for number in range(step, 12)]
    assert [one.plan for one in found] == [one.plan for one in expected]


def test_old_windows_are_forgotten() -> None:
    stream = planner(Shapes(1000), window=1)
    for step in range(40):
        stream.plan(step)
    assert len(stream.names) <= 4 * 6
    assert stream.state(36)["first_step"] == 36
    with pytest.raises(DataError, match="must not be planned after"):
        stream.plan(3)
    assert isinstance(stream.rows, np.ndarray)
