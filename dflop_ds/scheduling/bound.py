"""A lower bound on the largest bin, without solving."""

from __future__ import annotations

import numpy as np

from dflop_ds.scheduling.problem import Problem

_MAX_CROWDING = 8


def lower_bound_s(problem: Problem) -> float:
    """Seconds below which no assignment can bring its largest bin.

    The largest of three bounds, over all modules: the mean load of a bin; the largest sample; and
    crowding: of the ``k * num_bins + 1`` largest samples some bin holds ``k + 1``, which weigh at
    least as much as the ``k + 1`` smallest of them (``k = 1`` is the bound on pairs).

    Returns
    -------
    float
        0.0 for a problem without samples.
    """
    if problem.num_samples == 0:
        return 0.0
    num_bins = problem.num_bins
    descending_s = -np.sort(-problem.costs_s, axis=0)
    bounds_s = [descending_s.sum(axis=0).max() / num_bins, descending_s[0].max()]
    for crowd in range(1, min(_MAX_CROWDING, (problem.num_samples - 1) // num_bins) + 1):
        last = crowd * num_bins
        bounds_s.append(descending_s[last - crowd : last + 1].sum(axis=0).max())
    return float(max(bounds_s))
