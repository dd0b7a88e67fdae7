"""LPT for many bins: sections of them advance together, so that time grows with the samples alone.

Plain LPT looks at every bin for every sample. Here the bins are cut into sections with the same targets, the
samples are dealt to them in turn, back and forth, from the costliest down, and each section places its own.
Sections of hundreds of bins that are dealt like this differ so little that no sample would gain by another.
"""

from __future__ import annotations

import numpy as np

from dflop_ds.scheduling.problem import IntArray, Problem

_MIN_SECTION_BINS = 128
_MIN_SECTIONS = 4
"""With fewer of them plain LPT is no slower."""


def place_in_sections(problem: Problem, order: IntArray) -> IntArray | None:
    """Bin of every sample, or None where plain LPT has to place them.

    That is where there are too few bins for sections, where a rule binds bins of several sections, or where
    a sample fits into no bin of its section.

    Parameters
    ----------
    problem : Problem
    order : ndarray of int64, shape (num_samples,)
        Samples from the costliest down.
    """
    num_sections = _num_sections(problem)
    if num_sections == 1 or problem.num_samples < problem.num_bins:
        return None
    dealt = _dealt(order, num_sections)
    sections = _Sections(problem, dealt)
    bin_of = np.empty(problem.num_samples + 1, dtype=np.int64)
    for samples in dealt:
        bins = sections.place(samples)
        if bins is None:
            return None
        bin_of[samples] = bins
    return bin_of[:-1]


def _num_sections(problem: Problem) -> int:
    """Most sections with the same targets that are not too small; 1 where sections do not pay."""
    if problem.grouped_modules or problem.has_image.size:
        return 1
    scale = problem.bin_scale
    for count in range(problem.num_bins // _MIN_SECTION_BINS, _MIN_SECTIONS - 1, -1):
        if problem.num_bins % count == 0 and np.ptp(scale.reshape(count, -1), axis=0).max() == 0.0:
            return count
    return 1


def _dealt(order: IntArray, num_sections: int) -> IntArray:
    """Samples of each section, one row at a time, shape (num_rounds, num_sections).

    The number of samples stands for none where the last round does not go round.
    """
    num_rounds = -(-len(order) // num_sections)
    dealt = np.full(num_rounds * num_sections, len(order), dtype=np.int64)
    dealt[: len(order)] = order
    rounds: IntArray = dealt.reshape(num_rounds, num_sections)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds


class _Sections:
    """Loads of the bins of all sections; arrays end with the axes (num_sections, bins of a section)."""

    def __init__(self, problem: Problem, dealt: IntArray) -> None:
        num_sections = dealt.shape[1]
        shape = (num_sections, problem.num_bins // num_sections)
        scale = problem.bin_scale[: shape[1]]
        self._scale = scale[:1] if problem.has_equal_bins else scale
        # The last row stands for no sample.
        self._costs_s = np.vstack([problem.costs_s, np.zeros((1, problem.num_modules))])
        self._sizes = np.vstack([problem.sizes, np.zeros((1, problem.num_caps), dtype=np.int64)])
        self._caps = problem.caps[:, None, None]
        self._loads_s = np.zeros((problem.num_modules, *shape))
        self._used = np.zeros((problem.num_caps, *shape), dtype=np.int64)
        self._counts = np.zeros(shape, dtype=np.int64)
        self._num_empty = np.full(num_sections, shape[1], dtype=np.int64)
        self._num_left = np.count_nonzero(dealt < problem.num_samples, axis=0)
        self._rows = np.arange(num_sections)

    def place(self, samples: IntArray) -> IntArray | None:
        """Bins of one sample of every section, or None if one fits into no bin."""
        added_s = self._loads_s + self._costs_s[samples].T[:, :, None] / self._scale
        peaks_s = added_s.max(axis=0)
        if len(self._caps):
            used = self._used + self._sizes[samples].T[:, :, None]
            peaks_s[(used > self._caps).any(axis=0)] = np.inf
        filling = (self._num_left == self._num_empty) & (self._num_empty > 0)
        if filling.any():
            peaks_s[filling[:, None] & (self._counts > 0)] = np.inf
        least_s = peaks_s.min(axis=1, keepdims=True)
        if (least_s == np.inf).any():
            return None
        targets = self._first_of_the_best(peaks_s == least_s)
        rows = self._rows
        self._loads_s[:, rows, targets] = added_s[:, rows, targets]
        if len(self._caps):
            self._used[:, rows, targets] = used[:, rows, targets]
        self._num_empty -= self._counts[rows, targets] == 0
        self._num_left -= 1
        self._counts[rows, targets] += 1
        bins: IntArray = rows * self._counts.shape[1] + targets
        return bins

    def _first_of_the_best(self, equal: np.ndarray) -> IntArray:
        """Of equally good bins that with the smaller sum over modules, then with fewer samples."""
        if np.count_nonzero(equal) > len(equal):
            for key in (self._loads_s.sum(axis=0), self._counts):
                kept = np.where(equal, key, np.inf)
                equal = kept == kept.min(axis=1, keepdims=True)
        first: IntArray = equal.argmax(axis=1)
        return first
