"""A lower bound on the largest bin, without solving."""

from __future__ import annotations

import numpy as np

from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem

_MAX_CROWDING = 8


def lower_bound_s(problem: Problem) -> float:
    """Seconds below which no assignment can bring its largest bin.

    Loads are relative to what a bin should have, see `Problem.module_scale`. The largest of four bounds,
    over all modules: the mean load of a bin; the largest sample; crowding: of the ``k * num_bins + 1``
    largest samples some bin holds ``k + 1``, which weigh at least as much as the ``k + 1`` smallest of
    them (``k = 1`` is the bound on pairs); and the caps: the other bins can only take so much, so the bin
    of the costliest sample must take the rest, at the least cost per size.

    Returns
    -------
    float
        0.0 for a problem without samples.
    """
    if problem.num_samples == 0:
        return 0.0
    bounds_s = []
    for module in range(problem.num_modules):
        costs_s, scale = problem.costs_s[:, module], problem.module_scale[:, module]
        grouped = module in problem.grouped_modules
        if grouped:
            scale = scale[np.unique(problem.group_of, return_index=True)[1]]
        widest, num_bins = float(scale.max()), len(scale)
        descending_s = -np.sort(-costs_s)
        bounds_s += [descending_s.sum() / scale.sum(), descending_s[0] / widest]
        for crowd in range(1, min(_MAX_CROWDING, (problem.num_samples - 1) // num_bins) + 1):
            last = crowd * num_bins
            bounds_s.append(descending_s[last - crowd : last + 1].sum() / widest)
        if not grouped:
            giant = int(costs_s.argmax())
            bounds_s += [
                _cap_bound_s(costs_s, problem.sizes[:, cap], int(problem.caps[cap]), num_bins, giant) / widest
                for cap in range(problem.num_caps)
            ]
    return float(max(bounds_s))


def _cap_bound_s(costs_s: FloatArray, sizes: IntArray, cap: int, num_bins: int, giant: int) -> float:
    """Load of the bin of sample `giant` if it takes what the other bins cannot, cheapest size first."""
    needed = int(sizes.sum()) - cap * (num_bins - 1) - int(sizes[giant])
    load_s = float(costs_s[giant])
    if needed <= 0:
        return load_s
    rest = np.flatnonzero((sizes > 0) & (np.arange(len(sizes)) != giant))
    rest = rest[np.argsort(costs_s[rest] / sizes[rest], kind="stable")]
    filled = np.cumsum(sizes[rest])
    whole = int(np.searchsorted(filled, needed, side="left"))
    load_s += float(costs_s[rest[:whole]].sum())
    if whole < len(rest):
        missing = needed - (int(filled[whole - 1]) if whole else 0)
        load_s += float(costs_s[rest[whole]] * missing / sizes[rest[whole]])
    return load_s
