import itertools
import time

import numpy as np
import pytest

from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.assignment import Assignment
from dflop_ds.scheduling.ordering import order_bins
from dflop_ds.simulation.pipeline import simulate_1f1b


def _makespan_s(assignment, forward_s, backward_s, num_replicas):
    """Slowest replica, by the single-case simulator."""
    bins_s = [
        np.array([times[list(members)].sum(axis=0) for members in assignment.bins])
        for times in (forward_s, backward_s)
    ]
    shape = (num_replicas, -1, forward_s.shape[1])
    pairs = zip(*(times.reshape(shape) for times in bins_s), strict=True)
    return max(simulate_1f1b(forward.T, backward.T).makespan_s for forward, backward in pairs)


def _one_sample_per_bin(num_bins):
    return Assignment(tuple((index,) for index in range(num_bins)))


def _times_s(num_samples, num_stages, seed=0, sigma=0.6):
    forward_s = np.exp(np.random.default_rng(seed).normal(0.0, sigma, (num_samples, num_stages)))
    return forward_s, 2.0 * forward_s


def test_small_microbatches_move_to_both_ends():
    # Four equal stages: the big ones fill the middle, the small ones the start and the end.
    sizes_s = np.array([3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    forward_s = np.repeat(sizes_s[:, None], 4, axis=1)
    ordered = order_bins(
        _one_sample_per_bin(8), forward_s=forward_s, backward_s=forward_s, num_replicas=1, num_microbatches=8
    )
    order_s = sizes_s[[members[0] for members in ordered.bins]]
    assert order_s[0] == order_s[-1] == 1.0
    assert _makespan_s(ordered, forward_s, forward_s, 1) < _makespan_s(
        _one_sample_per_bin(8), forward_s, forward_s, 1
    )


@pytest.mark.parametrize("seed", range(3))
def test_close_to_the_best_of_all_orders(seed):
    forward_s, backward_s = _times_s(6, 3, seed)
    best_s = min(
        simulate_1f1b(forward_s[list(order)].T, backward_s[list(order)].T).makespan_s
        for order in itertools.permutations(range(6))
    )
    ordered = order_bins(
        _one_sample_per_bin(6), forward_s=forward_s, backward_s=backward_s, num_replicas=1, num_microbatches=6
    )
    assert _makespan_s(ordered, forward_s, backward_s, 1) <= 1.03 * best_s


def test_replicas_are_evened_out():
    forward_s = np.array([[8.0], [7.0], [6.0], [1.0], [2.0], [3.0]])
    ordered = order_bins(
        _one_sample_per_bin(6), forward_s=forward_s, backward_s=forward_s, num_replicas=2, num_microbatches=3
    )
    totals_s = [
        sum(forward_s[members[0], 0] for members in ordered.bins[start : start + 3]) for start in (0, 3)
    ]
    assert sorted(totals_s) == [13.0, 14.0], "from 21 and 6 to the even split of 27"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("num_replicas", "num_microbatches", "num_stages"), [(1, 1, 1), (2, 5, 2), (3, 8, 4)]
)
def test_never_worse_and_the_same_bins(seed, num_replicas, num_microbatches, num_stages):
    num_bins = num_replicas * num_microbatches
    forward_s, backward_s = _times_s(3 * num_bins, num_stages, seed)
    assignment = Assignment.from_bin_of(np.arange(3 * num_bins) % num_bins, num_bins)
    options = {"forward_s": forward_s, "backward_s": backward_s}
    ordered = order_bins(assignment, **options, num_replicas=num_replicas, num_microbatches=num_microbatches)
    assert sorted(ordered.bins) == sorted(assignment.bins)
    before_s, after_s = (
        _makespan_s(each, forward_s, backward_s, num_replicas) for each in (assignment, ordered)
    )
    assert after_s <= before_s
    assert ordered == order_bins(
        assignment, **options, num_replicas=num_replicas, num_microbatches=num_microbatches
    )


def test_the_given_order_stays_when_nothing_improves():
    assignment = _one_sample_per_bin(4)
    times_s = np.ones((4, 2))
    ordered = order_bins(
        assignment, forward_s=times_s, backward_s=times_s, num_replicas=2, num_microbatches=2
    )
    assert ordered is assignment


def test_empty_bins_and_no_samples_are_ordered():
    empty = Assignment(((), (), (), ()))
    times_s = np.zeros((0, 2))
    assert (
        order_bins(empty, forward_s=times_s, backward_s=times_s, num_replicas=2, num_microbatches=2) is empty
    )


def test_ordering_is_cheap():
    forward_s, backward_s = _times_s(32 * 6, 2)
    assignment = Assignment.from_bin_of(np.arange(32 * 6) % 32, 32)
    computed_s = []
    for _ in range(3):
        started_s = time.process_time()
        order_bins(
            assignment, forward_s=forward_s, backward_s=backward_s, num_replicas=2, num_microbatches=16
        )
        computed_s.append(time.process_time() - started_s)
    assert min(computed_s) < 0.2  # 5 ms on a core of today


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "num_microbatches", "message"),
    [
        (np.ones((3, 2)), np.ones((4, 2)), 4, r"num_samples = 4, num_stages\), found \(3, 2\)"),
        (np.ones((4, 2)), np.ones((4, 3)), 4, "the same shape"),
        (np.ones((4, 2)), -np.ones((4, 2)), 4, "not negative"),
        (np.ones((4, 2)), np.ones((4, 2)), 5, "= 5 bins, found 4"),
    ],
)
def test_mismatches_are_refused(forward_s, backward_s, num_microbatches, message):
    with pytest.raises(SchedulingError, match=message):
        order_bins(
            _one_sample_per_bin(4),
            forward_s=forward_s,
            backward_s=backward_s,
            num_replicas=1,
            num_microbatches=num_microbatches,
        )
