"""Longest processing time first, for several modules and hard limits."""

from __future__ import annotations

import numpy as np

from dflop_ds.errors import InfeasibleError
from dflop_ds.scheduling.descent import BinLoads, descend
from dflop_ds.scheduling.problem import Assignment, IntArray, Problem

_DESCENT_ROUNDS = 256


def solve_lpt(problem: Problem) -> Assignment:
    """Assign greedily, longest sample first, then improve by moves and swaps.

    Samples go in order of decreasing largest module cost into the bin whose largest module load
    stays least; ties go to the smaller sum over modules, then to the bin with fewer samples, then to
    the lower index. Where the caps stop this, samples are first-fitted by decreasing size. The result
    is a pure function of the problem, and no bin is empty unless there are fewer samples than bins.

    Raises
    ------
    InfeasibleError
        If neither way satisfies the caps; `min_bins` is what first-fit needs.
    """
    bin_of, rounds = _place_by_cost(problem), _DESCENT_ROUNDS
    if bin_of is None:
        bin_of, rounds = _place_by_size(problem), _DESCENT_ROUNDS + problem.num_samples
    state = BinLoads(problem, bin_of)
    descend(state, rounds)
    return Assignment.from_bin_of(state.bin_of, problem.num_bins)


def _place_by_cost(problem: Problem) -> IntArray | None:
    """Bin of every sample by LPT, or None if a sample fits into no bin."""
    costs_s, sizes, caps = problem.costs_s, problem.sizes, problem.caps[:, None]
    loads_s = np.zeros((problem.num_modules, problem.num_bins))
    used = np.zeros((problem.num_caps, problem.num_bins), dtype=np.int64)
    counts = np.zeros(problem.num_bins, dtype=np.int64)
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    for sample in np.lexsort((-costs_s.sum(axis=1), -costs_s.max(axis=1))):
        peaks_s = (loads_s + costs_s[sample][:, None]).max(axis=0)
        if problem.num_caps:
            peaks_s[(used + sizes[sample][:, None] > caps).any(axis=0)] = np.inf
        least_s = peaks_s.min()
        if np.isinf(least_s):
            return None
        ties = np.flatnonzero(peaks_s == least_s)
        if len(ties) > 1:
            ties = ties[np.lexsort((counts[ties], loads_s[:, ties].sum(axis=0)))]
        target = ties[0]
        loads_s[:, target] += costs_s[sample]
        used[:, target] += sizes[sample]
        counts[target] += 1
        bin_of[sample] = target
    return bin_of


def _place_by_size(problem: Problem) -> IntArray:
    """Bin of every sample by first-fit decreasing on the sizes relative to their caps."""
    relative = (problem.sizes / np.maximum(problem.caps, 1)).max(axis=1)
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    used = np.zeros((problem.num_samples, problem.num_caps), dtype=np.int64)
    for sample in np.argsort(-relative, kind="stable"):
        fits = (used + problem.sizes[sample] <= problem.caps).all(axis=1)
        target = int(fits.argmax())
        used[target] += problem.sizes[sample]
        bin_of[sample] = target
    min_bins = int(bin_of.max()) + 1
    if min_bins > problem.num_bins:
        raise InfeasibleError(_reason(problem, min_bins), min_bins)
    _fill_empty_bins(problem, bin_of)
    return bin_of


def _reason(problem: Problem, min_bins: int) -> str:
    caps = dict(zip(problem.cap_names, problem.caps.tolist(), strict=True))
    totals = problem.sizes.sum(axis=0)
    for name, total, cap in zip(problem.cap_names, totals, problem.caps, strict=True):
        if total > cap * problem.num_bins:
            found = (
                f"the batch needs {total} of {name}, {problem.num_bins} bins hold {cap * problem.num_bins}"
            )
            break
    else:
        found = f"no way was found to fit the {problem.num_samples} samples into {problem.num_bins} bins"
    return (
        f"the caps {caps} must hold in every bin; {found}. "
        f"Use at least {min_bins} bins (more microbatches), a smaller global batch, or raise the cap."
    )


def _fill_empty_bins(problem: Problem, bin_of: IntArray) -> None:
    """Give each empty bin the costliest sample of the bin that holds most samples."""
    counts = np.bincount(bin_of, minlength=problem.num_bins)
    peak_s = problem.costs_s.max(axis=1)
    for index in np.flatnonzero(counts == 0):
        source = int(counts.argmax())
        if counts[source] < 2:
            return
        members = np.flatnonzero(bin_of == source)
        bin_of[members[peak_s[members].argmax()]] = index
        counts[source] -= 1
        counts[index] += 1
