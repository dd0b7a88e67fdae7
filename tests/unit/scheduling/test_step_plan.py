"""The message that carries a step's plan."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from dflop_ds.errors import PlanError
from dflop_ds.scheduling.plan import StepPlan

BINS = ((5, 1, 9), (), (2**40,), (0, 3), (), (7,))


def _plan(**changes) -> StepPlan:
    values = {
        "step": 12,
        "epoch": 3,
        "num_replicas": 2,
        "num_microbatches": 3,
        "bins": BINS,
        "num_terms": 1234,
    }
    return StepPlan(**(values | changes))


def _signed(body: np.ndarray) -> np.ndarray:
    return np.concatenate([[zlib.crc32(body.tobytes())], body]).astype(np.int64)


@pytest.mark.parametrize(
    "plan",
    [
        _plan(),
        _plan(num_replicas=1, num_microbatches=1, bins=((4,),)),
        _plan(num_replicas=1, num_microbatches=2, bins=((), ())),
        _plan(num_replicas=3, num_microbatches=1, bins=((), (1,), ()), num_terms=0),
    ],
)
def test_round_trip(plan: StepPlan) -> None:
    message = plan.encode()
    assert message.dtype == np.int64
    found = StepPlan.decode(message)
    assert found == plan
    assert StepPlan.decode(np.frombuffer(message.tobytes(), dtype=np.int64)) == plan
    assert all(type(index) is int for members in found.bins for index in members)


@pytest.mark.parametrize("position", range(8 + 6 + 7))
def test_any_changed_number_is_found(position: int) -> None:
    message = _plan().encode()
    assert message.size == 8 + 6 + 7, "header, lengths, indices"
    message[position] += 1
    with pytest.raises(PlanError, match="checksum of a plan must match"):
        StepPlan.decode(message)


@pytest.mark.parametrize("size", [0, 1, 7, 20])
def test_cut_messages_are_refused(size: int) -> None:
    with pytest.raises(PlanError, match="damaged message"):
        StepPlan.decode(_plan().encode()[:size])


def test_another_version_is_refused() -> None:
    body = _plan().encode()[1:].copy()
    body[0] = 2
    with pytest.raises(PlanError, match="schema version 1, found 2"):
        StepPlan.decode(_signed(body))


def test_a_plan_with_another_number_of_bins_is_refused() -> None:
    with pytest.raises(PlanError, match="2 x 3 bins, found 5"):
        _plan(bins=BINS[:5])


def test_loss_scale_turns_the_mean_over_bins_into_the_mean_over_terms() -> None:
    assert _plan().loss_scale == 6 / 1234
    sums = np.array([3.0, 0.0, 5.0, 1.0, 0.0, 2.0])
    assert (sums * _plan().loss_scale).mean() == pytest.approx(sums.sum() / 1234)
    assert _plan(num_terms=0).loss_scale == 6.0, "no division by zero"


def test_replicas_own_consecutive_bins() -> None:
    plan = _plan()
    assert plan.replica_bins(0) == BINS[:3]
    assert plan.replica_bins(1) == BINS[3:]
