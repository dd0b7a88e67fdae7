"""Which samples form which global batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflop_ds.errors import ConfigError
from dflop_ds.scheduling.order import EpochOrder


def _positions(order: EpochOrder, steps: range) -> list[list[int]]:
    return [order.batch(step).positions.tolist() for step in steps]


def test_without_shuffling_by_hand() -> None:
    order = EpochOrder(7, 3, seed=0, shuffle=False)
    assert order.steps_per_epoch == 3
    assert _positions(order, range(4)) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert [order.batch(step).epoch for step in range(4)] == [0, 0, 0, 1]
    assert [order.batch(step).step for step in range(4)] == [0, 1, 2, 3]


def test_dropped_tail_by_hand() -> None:
    order = EpochOrder(7, 3, seed=0, shuffle=False, tail="drop")
    assert order.steps_per_epoch == 2
    assert _positions(order, range(3)) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(1, 1), (1, 8), (8, 8), (23, 5), (24, 6)])
def test_every_sample_once_per_epoch(num_samples: int, batch_size: int) -> None:
    order = EpochOrder(num_samples, batch_size, seed=3)
    for epoch in range(3):
        first = epoch * order.steps_per_epoch
        batches = _positions(order, range(first, first + order.steps_per_epoch))
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(num_samples))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert 1 <= len(batches[-1]) <= batch_size


def test_dropped_samples_differ_between_epochs() -> None:
    order = EpochOrder(10, 4, seed=0, tail="drop")
    dropped = []
    for epoch in range(4):
        used = set(itertools.chain.from_iterable(_positions(order, range(2 * epoch, 2 * epoch + 2))))
        assert len(used) == 8
        dropped.append(frozenset(range(10)) - used)
    assert len(set(dropped)) > 1


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    """Asked in any order of the steps, and at any batch size."""
    order = EpochOrder(30, 4, seed=5)
    forwards = _positions(order, range(20))
    assert [order.batch(step).positions.tolist() for step in reversed(range(20))][::-1] == forwards
    assert EpochOrder(30, 4, seed=5).permutation(1).tolist() == order.permutation(1).tolist()
    assert EpochOrder(30, 7, seed=5).permutation(1).tolist() == order.permutation(1).tolist()
    others = [order.permutation(0), order.permutation(2), EpochOrder(30, 4, seed=6).permutation(1)]
    assert all(other.tolist() != order.permutation(1).tolist() for other in others)


def test_resume_continues_where_training_stopped() -> None:
    """From step 5 on, the rest of the epoch is what the first five batches left."""
    order = EpochOrder(31, 4, seed=2)
    done = set(itertools.chain.from_iterable(_positions(order, range(5))))
    rest = set(itertools.chain.from_iterable(_positions(EpochOrder(31, 4, seed=2), range(5, 8))))
    assert done | rest == set(range(31))
    assert not done & rest


def test_shuffling_is_uniform() -> None:
    """First places are spread over the samples; 3000 epochs of 5."""
    order = EpochOrder(5, 5, seed=0)
    counts = np.bincount([order.permutation(epoch)[0] for epoch in range(3000)], minlength=5)
    assert counts.min() > 600 - 5 * 22
    assert counts.max() < 600 + 5 * 22


@pytest.mark.parametrize(("num_samples", "tail"), [(0, "partial"), (0, "drop"), (7, "drop")])
def test_an_epoch_without_a_batch_is_refused(num_samples: int, tail: str) -> None:
    with pytest.raises(ConfigError, match=f"one global batch of 8 samples, found {num_samples} samples"):
        EpochOrder(num_samples, 8, seed=0, tail=tail)


def test_fewer_samples_than_a_batch_make_one_partial_batch() -> None:
    order = EpochOrder(7, 8, seed=0, shuffle=False)
    assert _positions(order, range(2)) == [list(range(7))] * 2
