"""Position in the data: what it says, and when a run may go on from it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dflop_ds.errors import ConfigError
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.scheduling.position import SamplerPosition
from dflop_ds.shapes import SampleShape, ShapeTable


def planner(num_replicas: int = 1, names: str = "abcdefghij", **order: object) -> StepPlanner:
    shapes = [SampleShape(name, 0, 0, 3, 3, 1) for name in names]
    return StepPlanner(
        table=ShapeTable.from_shapes(shapes),
        rows=np.arange(len(names)),
        order=EpochOrder(len(names), **{"batch_size": 4, "seed": 1, **order}),
        num_replicas=num_replicas,
        num_microbatches=2,
        micro_batch_size=1,
        costs=None,
        policy="blind",
    )


@pytest.mark.parametrize(
    ("step", "tail", "expected"),
    [
        (0, "partial", (0, 0)),
        (2, "partial", (0, 8)),
        (3, "partial", (1, 0)),
        (7, "partial", (2, 4)),
        (3, "drop", (1, 4)),
    ],
)
def test_epoch_and_consumed_samples(step: int, tail: str, expected: tuple[int, int]) -> None:
    position = SamplerPosition.of(planner(tail=tail), step)
    assert (position.epoch, position.consumed_samples) == expected


def test_json_and_another_number_of_replicas() -> None:
    position = SamplerPosition.of(planner(), 5)
    again = SamplerPosition.from_json(json.loads(json.dumps(dataclasses.asdict(position))))
    assert again == position
    again.require_same_sequence(SamplerPosition.of(planner(num_replicas=2), 5))


def test_everything_that_changed_is_named() -> None:
    position = SamplerPosition.of(planner(), 5)
    with pytest.raises(ConfigError) as raised:
        position.require_same_sequence(SamplerPosition.of(planner(batch_size=5, seed=2), 5))
    assert "dflop.seed was 1, found 2" in str(raised.value)
    assert "train_batch_size was 4, found 5" in str(raised.value)
    assert "shuffle" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"ids of the training samples"):
        position.require_same_sequence(SamplerPosition.of(planner(names="abcdefghiX"), 5))
    moved = dataclasses.replace(planner(), rows=np.arange(10) + 1)
    with pytest.raises(ConfigError, match=r"ids of the training samples"):
        position.require_same_sequence(SamplerPosition.of(moved, 5))


def test_an_incomplete_position_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be complete"):
        SamplerPosition.from_json({"step": 3})
