"""Longest processing time first, for several modules and hard limits."""

from __future__ import annotations

import numpy as np

from dflop_ds.errors import InfeasibleError
from dflop_ds.scheduling.assignment import Assignment, check_bin_sizes
from dflop_ds.scheduling.descent import BinLoads, descend
from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem
from dflop_ds.scheduling.sections import place_in_sections
from dflop_ds.scheduling.sweep import sweep

_SWEEPS = 6
_MAX_DESCENT_ROUNDS = 256
_DESCENT_WORK = 2**18


def solve_lpt(problem: Problem) -> Assignment:
    """Assign greedily, longest sample first, then improve by moves and swaps.

    Samples go in order of decreasing largest module cost into the bin whose largest module load
    stays least; ties go to the smaller sum over modules, then to the bin with fewer samples, then to
    the lower index; 512 bins and more are filled in sections (`sections.py`). Where the caps stop this,
    samples are first-fitted by decreasing size. The result is a pure function of the problem, and no bin is
    empty unless there are fewer samples than bins.

    Raises
    ------
    InfeasibleError
        If neither way satisfies the caps; `min_bins` is what first-fit needs.
    """
    bin_of = _place_by_cost(problem)
    rounds = min(_MAX_DESCENT_ROUNDS, _DESCENT_WORK // max(1, problem.num_samples * problem.num_bins))
    if bin_of is None:
        bin_of = _place_by_size(problem)
        rounds = _MAX_DESCENT_ROUNDS + problem.num_samples
    bin_of = sweep(problem, bin_of, _SWEEPS)
    state = BinLoads(problem, bin_of)
    descend(state, rounds)
    return Assignment.from_bin_of(state.bin_of, problem.num_bins)


def _place_by_cost(problem: Problem) -> IntArray | None:
    """Bin of every sample by LPT, or None if a sample fits into no bin."""
    costs_s = problem.costs_s
    order = np.lexsort((-costs_s.sum(axis=1), -costs_s.max(axis=1)))
    bin_of = place_in_sections(problem, order)
    return _place_one_by_one(problem, order) if bin_of is None else bin_of


def _place_one_by_one(problem: Problem, order: IntArray) -> IntArray | None:
    costs_s = problem.costs_s
    loads_s = np.zeros((problem.num_modules, problem.num_bins))
    counts = np.zeros(problem.num_bins, dtype=np.int64)
    barred = _Bars(problem)
    scale: FloatArray | float = np.ascontiguousarray(problem.module_scale.T)
    if problem.has_equal_bins:
        costs_s, scale = costs_s / problem.bin_scale[0], 1.0
    groups = problem.group_of if problem.grouped_modules else None
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    added_s = np.empty_like(loads_s)
    for sample in order.tolist():
        np.add(loads_s, costs_s[sample][:, None] / scale, out=added_s)
        peaks_s = added_s[0].copy()
        for module in range(1, len(added_s)):
            np.maximum(peaks_s, added_s[module], out=peaks_s)
        barred.apply(sample, peaks_s)
        target = int(peaks_s.argmin())
        least_s = peaks_s[target]
        if least_s == np.inf:
            return None
        equal = peaks_s == least_s
        if np.count_nonzero(equal) > 1:
            ties = np.flatnonzero(equal)
            target = int(ties[np.lexsort((counts[ties], loads_s[:, ties].sum(axis=0)))[0]])
        loads_s[:, target] = added_s[:, target]
        if groups is not None:
            for module in problem.grouped_modules:
                loads_s[module, groups == groups[target]] = added_s[module, target]
        counts[target] += 1
        barred.take(sample, target)
        bin_of[sample] = target
    return bin_of


class _Bars:
    """Bins that a sample may not enter: full ones, and others while the last samples must fill empty bins."""

    def __init__(self, problem: Problem) -> None:
        self._sizes, self._caps = problem.sizes, problem.caps[:, None]
        self._used = np.zeros((problem.num_caps, problem.num_bins), dtype=np.int64)
        self._has_image = problem.has_image if problem.has_image.size else None
        self._empty = np.ones(problem.num_bins, dtype=np.bool_)
        self._imageless = self._empty.copy()
        self._num_empty = self._num_imageless = problem.num_bins
        self._num_left, self._num_images_left = problem.num_samples, int(problem.has_image.sum())

    def apply(self, sample: int, peaks_s: FloatArray) -> None:
        """Set the peak of every barred bin to infinity."""
        if len(self._caps):
            peaks_s[(self._used + self._sizes[sample][:, None] > self._caps).any(axis=0)] = np.inf
        if self._num_left == self._num_empty:
            peaks_s[~self._empty] = np.inf
        if (
            self._has_image is not None
            and self._has_image[sample]
            and self._num_images_left == self._num_imageless
        ):
            peaks_s[~self._imageless] = np.inf

    def take(self, sample: int, target: int) -> None:
        """Note where a sample went."""
        if len(self._caps):
            self._used[:, target] += self._sizes[sample]
        self._num_left -= 1
        if self._empty[target]:
            self._empty[target] = False
            self._num_empty -= 1
        if self._has_image is not None and self._has_image[sample]:
            self._num_images_left -= 1
            if self._imageless[target]:
                self._imageless[target] = False
                self._num_imageless -= 1


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
    check_bin_sizes(problem, bin_of, "Use fewer microbatches, or raise the caps.")
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
