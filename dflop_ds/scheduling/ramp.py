"""Target weights of the microbatches: smaller at both ends, where the other stages wait.

Equal microbatches do not make the shortest pipeline. The first forwards and the last backwards run while
most stages idle, so a step is shorter when the microbatches at both ends are small. How small is decided
by simulation of microbatches that can be cut at will.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from dflop_ds.scheduling.problem import FloatArray
from dflop_ds.simulation.pipeline import makespans_1f1b

_END_WEIGHTS = (0.1, 0.25, 0.45, 0.7, 1.0)
_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
_STEPS = (0.7, 0.9, 1.1, 1.4)
_LEAST_WEIGHT = 0.05
_MAX_ROUNDS = 24
_RELATIVE_GAIN = 1e-5


def ramp_weights(
    forward_s: Sequence[float], backward_s: Sequence[float], num_microbatches: int
) -> tuple[float, ...]:
    """Weights of the microbatches that make the simulated 1F1B step shortest.

    Parameters
    ----------
    forward_s, backward_s : sequence of float, length num_stages
        Seconds of each stage for one mean microbatch.
    num_microbatches : int

    Returns
    -------
    tuple of float, length num_microbatches
        With mean 1; all 1.0 where no ramp shortens the step, as with one stage.
    """
    longest_s = max(*forward_s, *backward_s)
    if longest_s <= 0.0 or len(forward_s) == 1 or num_microbatches == 1:
        return (1.0,) * num_microbatches
    # Only ratios matter, so that batches with the same proportions share one search.
    ratios = [tuple(round(value / longest_s, 3) for value in times) for times in (forward_s, backward_s)]
    return _search(ratios[0], ratios[1], num_microbatches)


@functools.lru_cache(maxsize=256)
def _search(
    forward: tuple[float, ...], backward: tuple[float, ...], num_microbatches: int
) -> tuple[float, ...]:
    def makespans(weights: FloatArray) -> FloatArray:
        scaled = weights / weights.mean(axis=1, keepdims=True)
        return makespans_1f1b(
            np.array(forward)[None, :, None] * scaled[:, None, :],
            np.array(backward)[None, :, None] * scaled[:, None, :],
        )

    starts = _ramps(num_microbatches)
    times = makespans(starts)
    best, least, equal = starts[times.argmin()], float(times.min()), float(times[0])
    for _ in range(_MAX_ROUNDS):
        tried = _changed(best)
        times = makespans(tried)
        if times.min() >= least * (1.0 - _RELATIVE_GAIN):
            break
        best, least = tried[times.argmin()], float(times.min())
    if least >= equal * (1.0 - _RELATIVE_GAIN):
        return (1.0,) * num_microbatches
    return tuple(float(weight) for weight in best / best.mean())


def _ramps(num_microbatches: int) -> FloatArray:
    """Linear ramps of several lengths and depths at both ends; the first is flat."""
    lengths = [length for length in _LENGTHS if length <= max(1, num_microbatches // 2)]
    ends = [(1.0, 1), *itertools.product(_END_WEIGHTS[:-1], lengths)]
    rows = []
    for (first, rise), (last, fall) in itertools.product(ends, ends):
        weights = np.ones(num_microbatches)
        weights[:rise] = np.minimum(weights[:rise], first + (1.0 - first) * np.arange(rise) / rise)
        down = last + (1.0 - last) * np.arange(fall) / fall
        weights[::-1][:fall] = np.minimum(weights[::-1][:fall], down)
        rows.append(weights)
    return np.array(rows)


def _changed(weights: FloatArray) -> FloatArray:
    """Weights with one entry, or one and all outside it, made smaller or larger."""
    count = len(weights)
    factors = np.array(_STEPS)
    single = 1.0 + (factors[:, None, None] - 1.0) * np.eye(count)[None]
    head = 1.0 + (factors[:, None, None] - 1.0) * np.tri(count)[None]
    rows = np.concatenate([single.reshape(-1, count), head.reshape(-1, count)])
    changed: FloatArray = np.maximum(weights * rows, _LEAST_WEIGHT)
    return changed
