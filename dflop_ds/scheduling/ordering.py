"""Order of the bins: which replica runs which microbatch, and when.

Equal bins are not enough: with few microbatches a pipeline is shorter when its smaller microbatches
run first and last, where the other stages wait. The order is chosen by simulation.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.assignment import Assignment
from dflop_ds.scheduling.problem import FloatArray, IntArray
from dflop_ds.simulation.pipeline import makespans_1f1b

_MAX_SWAPS = 128
_MAX_SLOWEST = 8
MAX_ROUNDS = 6
_RELATIVE_GAIN = 1e-9


@dataclasses.dataclass(frozen=True)
class _Bins:
    """Seconds of every bin, arrays of shape (num_bins, num_stages)."""

    forward_s: FloatArray
    backward_s: FloatArray

    @property
    def total_s(self) -> FloatArray:
        return self.forward_s + self.backward_s

    def makespans_s(self, orders: IntArray) -> FloatArray:
        """Makespan of each order, shape (..., num_microbatches) of bin indices -> shape (...)."""
        flat = orders.reshape(-1, orders.shape[-1])
        forward_s, backward_s = (
            np.swapaxes(times[flat], 1, 2) for times in (self.forward_s, self.backward_s)
        )
        return makespans_1f1b(forward_s, backward_s).reshape(orders.shape[:-1])


def order_bins(
    assignment: Assignment,
    *,
    forward_s: npt.ArrayLike,
    backward_s: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    max_rounds: int = MAX_ROUNDS,
) -> Assignment:
    """Choose the replica and position of every bin for the shortest simulated step.

    The contents of the bins stay as they are, so every cap keeps holding. Tried are: the given replicas
    and replicas evened out by exchanging bins of similar size; in each replica the bins as given,
    ascending, descending, and small at both ends; then pairwise swaps from the best of these.

    Parameters
    ----------
    assignment : Assignment
        A valid assignment of ``num_replicas * num_microbatches`` bins.
    forward_s, backward_s : array_like, shape (num_samples, num_stages)
        Predicted seconds of each sample in each pipeline stage.
    num_replicas, num_microbatches : int
    max_rounds : int
        Most rounds of swaps.

    Returns
    -------
    Assignment
        The same bins in the order to run them; `assignment` itself if nothing shortens the slowest replica.

    Raises
    ------
    SchedulingError
        If the times do not have one row per sample, or are negative, NaN or infinite, or the number of
        bins is another.
    """
    num_bins = num_replicas * num_microbatches
    if len(assignment.bins) != num_bins:
        raise SchedulingError(
            f"an assignment must have num_replicas * num_microbatches = {num_bins} bins, "
            f"found {len(assignment.bins)}. Give the counts of the problem that was solved."
        )
    bins = _Bins(_bin_times_s(assignment, forward_s), _bin_times_s(assignment, backward_s))
    if bins.forward_s.shape != bins.backward_s.shape:
        raise SchedulingError(
            "forward_s and backward_s must have the same shape, found "
            f"{np.shape(forward_s)} and {np.shape(backward_s)}. Give one number per sample and stage."
        )
    given = np.arange(num_bins).reshape(num_replicas, num_microbatches)
    both = np.concatenate([given, _even_replicas(bins, given.shape)])
    candidates = _simple_orders(bins, both)
    candidates_s = bins.makespans_s(candidates)
    original_s = float(candidates_s[0, :num_replicas].max())
    best, rows = candidates_s.argmin(axis=0), np.arange(len(both))
    starts = [
        (candidates[best[half], half], candidates_s[best[half], half])
        for half in (rows[:num_replicas], rows[num_replicas:])
    ]
    orders, makespans_s = min(starts, key=lambda start: (start[1].max(), start[1].sum()))
    orders, makespans_s = _swap_descent(bins, orders, makespans_s, max_rounds)
    if makespans_s.max() >= original_s * (1.0 - _RELATIVE_GAIN):
        return assignment
    return Assignment(tuple(assignment.bins[index] for index in orders.ravel()))


def step_makespan_s(
    assignment: Assignment,
    *,
    forward_s: npt.ArrayLike,
    backward_s: npt.ArrayLike,
    num_replicas: int,
    num_microbatches: int,
    replica_speeds: npt.ArrayLike = (),
) -> float:
    """Simulated seconds of the slowest replica, bins in the given order.

    Parameters
    ----------
    assignment, forward_s, backward_s, num_replicas, num_microbatches
        As in :func:`order_bins`.
    replica_speeds : array_like, shape (num_replicas,)
        Times of a replica are divided by its speed. Empty: all 1.
    """
    bins = _Bins(_bin_times_s(assignment, forward_s), _bin_times_s(assignment, backward_s))
    orders = np.arange(num_replicas * num_microbatches).reshape(num_replicas, num_microbatches)
    makespans_s = bins.makespans_s(orders)
    speeds = np.asarray(replica_speeds, dtype=np.float64)
    return float((makespans_s / speeds if speeds.size else makespans_s).max())


def _bin_times_s(assignment: Assignment, times_s: npt.ArrayLike) -> FloatArray:
    times, bin_of = np.asarray(times_s, dtype=np.float64), assignment.bin_of()
    if times.ndim != 2 or len(times) != len(bin_of):
        raise SchedulingError(
            f"stage times must have shape (num_samples = {len(bin_of)}, num_stages), found {times.shape}. "
            "Give one row per sample."
        )
    result = np.zeros((len(assignment.bins), times.shape[1]))
    np.add.at(result, bin_of, times)
    return result


def _even_replicas(bins: _Bins, shape: tuple[int, int]) -> IntArray:
    """Deal bins of similar size one to each replica, the heaviest to the replica with the least so far."""
    num_replicas, num_microbatches = shape
    total_s = bins.total_s
    ranked = np.argsort(-total_s.max(axis=1), kind="stable").reshape(num_microbatches, num_replicas)
    sums_s = np.zeros((num_replicas, total_s.shape[1]))
    result = np.empty((num_replicas, num_microbatches), dtype=np.int64)
    for rank, equals in enumerate(ranked):
        replicas = np.argsort(sums_s.max(axis=1), kind="stable")
        result[replicas, rank] = equals
        sums_s[replicas] += total_s[equals]
    return result


def _simple_orders(bins: _Bins, replicas: IntArray) -> IntArray:
    """Orders of each replica's bins, shape (4, num_rows, num_microbatches); the first is as given."""
    num_microbatches = replicas.shape[1]
    rank = np.argsort(bins.total_s.max(axis=1)[replicas], axis=1, kind="stable")
    ascending = np.take_along_axis(replicas, rank, axis=1)
    both_ends = np.concatenate([np.arange(0, num_microbatches, 2), np.arange(1, num_microbatches, 2)[::-1]])
    return np.stack([replicas, ascending, ascending[:, ::-1], ascending[:, both_ends]])


def _swap_positions(num_microbatches: int) -> IntArray:
    """Pairs of positions to swap, shape (num_swaps, 2), those close to an end first."""
    if num_microbatches > _MAX_SWAPS:
        # There are enough pairs with the first position; all pairs would be too many to list.
        return np.stack([np.zeros(_MAX_SWAPS, dtype=np.int64), np.arange(1, _MAX_SWAPS + 1)], axis=1)
    first, second = np.triu_indices(num_microbatches, k=1)
    from_end = np.minimum(first, num_microbatches - 1 - second)
    chosen = np.sort(np.argsort(from_end, kind="stable")[:_MAX_SWAPS])
    return np.stack([first[chosen], second[chosen]], axis=1)


def _swap_descent(
    bins: _Bins, orders: IntArray, makespans_s: FloatArray, max_rounds: int
) -> tuple[IntArray, FloatArray]:
    """Apply the best swap of each of the slowest replicas until none shortens its makespan."""
    num_microbatches = orders.shape[1]
    if max_rounds == 0 or num_microbatches == 1:
        return orders, makespans_s
    pairs = _swap_positions(num_microbatches)
    swaps = np.tile(np.arange(num_microbatches), (len(pairs), 1))
    rows = np.arange(len(pairs))
    swaps[rows, pairs[:, 0]], swaps[rows, pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    orders, makespans_s = orders.copy(), makespans_s.copy()
    for _ in range(max_rounds):
        # The slowest replicas decide the step; the others need not be quicker.
        slowest = np.argsort(-makespans_s, kind="stable")[:_MAX_SLOWEST]
        tried_s = bins.makespans_s(orders[slowest][:, swaps])
        best = tried_s.argmin(axis=1)
        least_s = tried_s.min(axis=1)
        better = least_s < makespans_s[slowest] * (1.0 - _RELATIVE_GAIN)
        if not better.any():
            break
        improved = slowest[better]
        orders[improved] = np.take_along_axis(orders[improved], swaps[best[better]], axis=1)
        makespans_s[improved] = least_s[better]
    return orders, makespans_s
