"""Two replicas over one stream, step by step as their ranks go, without communication."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflop_ds.data.stream import StreamRecords
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.scheduling.windows import StreamPlanner
from dflop_ds.shapes import SampleShape, ShapeTable

LOOKAHEAD, NUM_STEPS = 2, 14


class Stream:
    """26 records a pass; every seventh cannot be used."""

    def __iter__(self) -> Any:
        return ({"id": str(place)} for place in range(26))


class Shapes:
    """Shapes of a stream as ``ShapeReader`` gives them."""

    def __init__(self, records: StreamRecords) -> None:
        self.records = records
        self.state = records.state

    @property
    def pass_number(self) -> int:
        return self.records.pass_number

    def next_shape(self, pass_number: int) -> tuple[int, SampleShape | None] | None:
        found = self.records.read_next(pass_number)
        if found is None:
            return None
        number, record = found
        return number, None if number % 7 == 6 else SampleShape(record["id"], 0, 0, 10, 10, 5)


class Run:
    """Rank 0 plans and trains replica 0, rank 1 trains replica 1; plans arrive some steps ahead."""

    def __init__(self) -> None:
        self.records = [StreamRecords(Stream()), StreamRecords(Stream())]

        def make(table: ShapeTable, rows: Any) -> StepPlanner:
            return StepPlanner(table, rows, EpochOrder(len(table), 4, seed=5), 2, 2, 1, None, policy="blind")

        order = EpochOrder(8, 4, seed=5)
        self.planner = StreamPlanner(Shapes(self.records[0]), order, make, 2, 2, 2 * LOOKAHEAD + 4)
        self.step, self.plans = 0, list[StepPlan]()

    def tell(self, plan: StepPlan) -> None:
        for replica, records in enumerate(self.records):
            own = {number for members in plan.replica_bins(replica) for number in members}
            everyone = {number for members in plan.bins for number in members}
            records.planned(plan.epoch, own, everyone - own)

    def train(self) -> list[list[tuple[int, str]]]:
        """What each rank draws in the next step."""
        while len(self.plans) <= LOOKAHEAD:
            self.planner.plan(self.step + len(self.plans) + LOOKAHEAD)  # the planning thread is ahead
            self.plans.append(self.planner.plan(self.step + len(self.plans)).plan)
            self.tell(self.plans[-1])
        plan, self.step = self.plans.pop(0), self.step + 1
        drawn = []
        for replica, records in enumerate(self.records):
            numbers = [number for members in plan.replica_bins(replica) for number in members]
            drawn.append([(number, records.draw(number)[1]["id"]) for number in numbers])
        return drawn

    def save(self) -> dict[str, Any]:
        plans = [plan.encode().tolist() for plan in self.plans]
        return json.loads(json.dumps({"plans": plans, "step": self.step, **self.planner.state(self.step)}))

    @classmethod
    def load(cls, saved: dict[str, Any], with_plans: bool) -> Run:
        run = cls()
        run.planner.restore(saved)
        for records in run.records:
            records.restore(saved["records"])
        run.step = saved["step"]
        run.plans = [StepPlan.decode(plan) for plan in saved["plans"]] if with_plans else []
        for plan in run.plans:
            run.tell(plan)
        return run


@pytest.mark.parametrize("with_plans", [True, False])
@pytest.mark.parametrize("save_at", [0, 1, 2, 5, 6, 9])
def test_ranks_draw_the_same_after_a_restart(save_at: int, with_plans: bool) -> None:
    whole = Run()
    expected = [whole.train() for _ in range(NUM_STEPS)]
    flat = [number for step in expected for rank in step for number, _ in rank]
    usable = [number for number in range(max(flat) + 1) if number % 7 != 6]
    assert sorted(flat)[:20] == usable[:20]
    assert len(set(flat)) == len(flat)
    assert all(name == str(number % 26) for step in expected for rank in step for number, name in rank)
    assert max(len(records._kept) for records in whole.records) <= 8 * 4
    first = Run()
    for _ in range(save_at):
        first.train()
    resumed = Run.load(first.save(), with_plans)
    assert [resumed.train() for _ in range(NUM_STEPS - save_at)] == expected[save_at:]
