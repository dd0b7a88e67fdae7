"""Bins of samples of similar length: sorted by length and cut into runs, which waste least padding."""

from __future__ import annotations

import itertools
import math

import numpy as np

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.scheduling.problem import FloatArray, IntArray
from dflop_ds.scheduling.rank_step import RankStep

_LONGEST_RUN = 8
"""Samples of the longest run, in means: bounds the effort."""


def cut_into_runs(step: RankStep, cost: MicrobatchCost, power: float) -> list[IntArray] | None:
    """Cut the samples, longest first, into `num_bins` runs with the least sum of costs to the `power`.

    Power 1 has the least padding, a large one runs of equal cost. None if no such runs keep the hard limits.
    Found by dynamic programming over the number of runs and of samples in them.
    """
    order = np.lexsort((-step.encoder_inputs, -step.llm_tokens))
    run_costs = _run_costs(step, cost, order)
    run_costs = (run_costs / run_costs[np.isfinite(run_costs)].max(initial=1e-300)) ** power
    num_samples, longest = run_costs.shape
    least = np.full(num_samples + 1, np.inf)
    least[0] = 0.0
    starts = np.zeros((step.num_bins, num_samples + 1), dtype=np.int64)
    ends, lengths = np.arange(1, num_samples + 1)[:, None], np.arange(1, longest + 1)
    first = np.maximum(ends - lengths, 0)
    for index in range(step.num_bins):
        sums = np.where(ends >= lengths, least[first] + run_costs[first, lengths - 1], np.inf)
        best = sums.argmin(axis=1)
        starts[index, 1:] = np.arange(num_samples) - best
        least = np.append(np.inf, sums[np.arange(num_samples), best])
    if not np.isfinite(least[-1]):
        return None
    edges = [num_samples]
    for index in reversed(range(step.num_bins)):
        edges.append(int(starts[index, edges[-1]]))
    return [order[a:b] for a, b in itertools.pairwise(edges[::-1])]


def _run_costs(step: RankStep, cost: MicrobatchCost, order: IntArray) -> FloatArray:
    """Seconds of each run by its first sample and its length - 1; infinite where it is not allowed."""
    num_samples = step.num_samples
    longest = min(num_samples, _LONGEST_RUN * math.ceil(num_samples / step.num_bins))
    starts, counts = np.arange(num_samples)[:, None], np.arange(1, longest + 1)
    ends = np.minimum(starts + counts, num_samples)
    tokens, inputs = step.llm_tokens[order], step.encoder_inputs[order]
    if step.padded:
        run_tokens, run_squares = counts * tokens[:, None], counts * tokens[:, None] ** 2
    else:
        run_tokens, run_squares = _span(tokens, starts, ends), _span(tokens**2, starts, ends)
    sizes = MicrobatchSizes(run_tokens, run_squares, _span(inputs, starts, ends))
    is_run = (starts + counts <= num_samples) & step.allows(sizes)
    seconds: FloatArray = np.where(is_run, cost.phases_s(sizes).sum(axis=-1), np.inf)
    return seconds


def _span(values: FloatArray, starts: IntArray, ends: IntArray) -> FloatArray:
    """Sums of ``values[start:end]``."""
    sums = np.append(0.0, np.cumsum(values))
    total: FloatArray = sums[ends] - sums[starts]
    return total
