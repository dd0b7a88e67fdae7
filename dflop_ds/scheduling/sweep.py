"""Many exchanges at once: full bins meet emptier ones in disjoint pairs, and each pair swaps for itself."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import numpy.typing as npt

from dflop_ds.scheduling.assignment import scaled_loads_s
from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem

_MAX_ENTRIES = 2**22
_MAX_STALLED = 4
_SPREAD_WEIGHT = 1e-3
_RELATIVE_GAIN = 1e-9
_FIXED_PAIRINGS = 3


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Members of every bin in a rectangle; slot 0 is empty and stands for a plain move.

    `sample` [num_bins, num_slots] holds -1 where there is none.
    """

    sample: IntArray
    counts: IntArray


def sweep(
    problem: Problem, bin_of: IntArray, max_rounds: int, seed: int = 0, *, end_s: float = np.inf
) -> IntArray:
    """Improve an assignment by the best move or swap of each of many pairs of bins.

    The larger of the two loads of a pair never grows, no cap is newly broken, and no bin is emptied. Pairs
    are the fullest with the emptiest first, then drawn from `seed`.

    Parameters
    ----------
    problem : Problem
        With grouped modules nothing is done: pairs would not be independent.
    bin_of : ndarray of int64, shape (num_samples,)
    max_rounds : int
    seed : int
    end_s : float
        Time on `time.perf_counter` after which no round starts.

    Returns
    -------
    ndarray of int64, shape (num_samples,)
    """
    if problem.grouped_modules or problem.num_bins == 1 or problem.num_samples == 0:
        return bin_of
    bin_of, rng, stalled = bin_of.copy(), np.random.default_rng(seed), 0
    for round_number in range(max_rounds):
        if time.perf_counter() > end_s:
            break
        slots = _slots(bin_of, problem.num_bins)
        entries = problem.num_bins // 2 * slots.sample.shape[1] ** 2
        if stalled >= _MAX_STALLED or entries * (problem.num_modules + problem.num_caps) > _MAX_ENTRIES:
            break
        loads_s = scaled_loads_s(problem, bin_of)
        first, second = _pairs(loads_s.max(axis=1), round_number, rng)
        moved = _exchange(problem, bin_of, slots, loads_s, first, second)
        stalled = 0 if moved else stalled + (round_number >= _FIXED_PAIRINGS)
    return bin_of


def _pairs(peaks_s: FloatArray, round_number: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Fuller and emptier bins of each pair."""
    order = np.argsort(-peaks_s, kind="stable")
    half = len(order) // 2
    if round_number % (_FIXED_PAIRINGS + 1) < _FIXED_PAIRINGS:
        return order[:half], order[::-1][:half]
    return order[:half], rng.permutation(order[half:])[:half]


def _slots(bin_of: IntArray, num_bins: int) -> _Slots:
    counts = np.bincount(bin_of, minlength=num_bins)
    sample = np.full((num_bins, int(counts.max()) + 1), -1, dtype=np.int64)
    order = np.argsort(bin_of, kind="stable")
    starts = np.cumsum(counts) - counts
    sample[bin_of[order], 1 + np.arange(len(order)) - starts[bin_of[order]]] = order
    return _Slots(sample, counts)


def _exchange(
    problem: Problem,
    bin_of: IntArray,
    slots: _Slots,
    loads_s: FloatArray,
    first: IntArray,
    second: IntArray,
) -> bool:
    """Apply the best exchange of every pair in place; False if none helps."""
    ours, theirs = slots.sample[first][:, :, None], slots.sample[second][:, None, :]
    shape = (len(first), ours.shape[1], theirs.shape[2])
    peak_s, spread_s = np.zeros(shape), np.zeros(shape)
    for module in range(problem.num_modules):
        costs_s = np.append(problem.costs_s[:, module], 0.0)
        moved_s = costs_s[ours] - costs_s[theirs]
        scale = problem.module_scale[:, module]
        left_s = loads_s[first, module][:, None, None] - moved_s / scale[first][:, None, None]
        right_s = loads_s[second, module][:, None, None] + moved_s / scale[second][:, None, None]
        larger_s = np.maximum(left_s, right_s)
        np.maximum(peak_s, larger_s, out=peak_s)
        spread_s += larger_s
    score = peak_s + _SPREAD_WEIGHT * spread_s
    allowed = _allowed(problem, bin_of, slots, first, second)
    before_s = np.maximum(loads_s[first], loads_s[second])
    old_peak_s = before_s.max(axis=1)
    old_score = old_peak_s + _SPREAD_WEIGHT * before_s.sum(axis=1)
    score[~allowed | (peak_s > old_peak_s[:, None, None])] = np.inf
    flat = score.reshape(len(first), -1)
    best = flat.argmin(axis=1)
    better = np.flatnonzero(flat[np.arange(len(first)), best] < old_score * (1.0 - _RELATIVE_GAIN))
    left, right = np.divmod(best[better], shape[2])
    for places, slot, target in ((first, left, second), (second, right, first)):
        samples = slots.sample[places[better], slot]
        bin_of[samples[samples >= 0]] = target[better][samples >= 0]
    return len(better) > 0


def _allowed(
    problem: Problem, bin_of: IntArray, slots: _Slots, first: IntArray, second: IntArray
) -> npt.NDArray[np.bool_]:
    """Exchanges that exist, empty no bin and break no cap, shape (num_pairs, num_slots, num_slots)."""
    ours, theirs = slots.sample[first] >= 0, slots.sample[second] >= 0
    ours[:, 0] = slots.counts[second] > 1
    theirs[:, 0] = slots.counts[first] > 1
    allowed: npt.NDArray[np.bool_] = ours[:, :, None] & theirs[:, None, :]
    for cap in range(len(problem.limit_caps)):
        sizes = problem.limit_sizes[:, cap]
        used = np.zeros(problem.num_bins, dtype=np.int64)
        np.add.at(used, bin_of, sizes)
        sizes, limit = np.append(sizes, 0), problem.limit_caps[cap]
        moved = sizes[slots.sample[first]][:, :, None] - sizes[slots.sample[second]][:, None, :]
        allowed &= used[first][:, None, None] - moved <= limit
        allowed &= used[second][:, None, None] + moved <= limit
    return allowed
