"""A few bins of a problem as a sub-problem in integers."""

from __future__ import annotations

import dataclasses

import numpy as np

from dflop_ds.scheduling.descent import BinLoads
from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem

_LARGEST_INTEGER = 2**30


@dataclasses.dataclass(frozen=True)
class Group:
    """A sub-problem: some bins, of which some samples may change place.

    ``costs`` [num_group_bins, num_free, num_modules] relative to what each bin should have, ``base``
    [num_group_bins, num_modules] loads of the samples that stay, ``sizes`` [num_free, num_limits], ``room``
    [num_group_bins, num_limits]; all scaled to integers. ``mean`` is a lower bound on the peak.
    ``columns`` lists for each module the sets of bins whose load counts together. ``hint`` [num_free] is the
    present bin of each free sample. Bins of ``bare`` hold free samples only and must not become empty. Free
    samples are in order of decreasing cost.
    """

    costs: IntArray
    base: IntArray
    sizes: IntArray
    room: IntArray
    mean: int
    columns: list[list[IntArray]]
    hint: IntArray
    bare: IntArray
    interchangeable: bool
    gap: float


def make_group(state: BinLoads, bins: IntArray, samples: IntArray, *, gap: float) -> Group:
    """Sub-problem of the given bins (ascending) in which `samples` may change place."""
    problem = state.problem
    local = np.searchsorted(bins, state.bin_of[samples])
    scale = problem.module_scale[bins]
    columns = [_counted_together(problem, bins, module) for module in range(problem.num_modules)]
    base_s, used = state.loads_s[bins].copy(), state.used[bins].copy()
    for module, sets in enumerate(columns):
        for together in sets:
            free_s = problem.costs_s[samples[np.isin(local, together)], module].sum()
            base_s[together, module] -= free_s / scale[together, module]
    np.subtract.at(used, local, problem.limit_sizes[samples])
    unit_s = float(state.loads_s[bins].sum(axis=0).max() * max(1.0, float(scale.max() / scale.min())))
    unit_s /= _LARGEST_INTEGER
    size_unit = 1 + np.maximum(problem.limit_caps, 0) // _LARGEST_INTEGER
    staying = state.counts[bins] - np.bincount(local, minlength=len(bins))
    alike = problem.has_equal_bins or bool((scale == scale[0]).all() and not problem.grouped_modules)
    interchangeable = alike and not staying.any()
    bare = np.flatnonzero((staying == 0) & (state.counts[bins] > 0))
    if interchangeable:
        base_s[:] = 0.0
        local = _first_appearance(local)
    costs = np.rint(problem.costs_s[samples] / scale[:, None, :] / unit_s).astype(np.int64)
    base = np.rint(np.maximum(base_s, 0.0) / unit_s).astype(np.int64)
    return Group(
        costs=costs,
        base=base,
        sizes=-(-problem.limit_sizes[samples] // size_unit),
        room=(problem.limit_caps - used) // size_unit,
        mean=_least_peak(costs, base, scale, columns),
        columns=columns,
        hint=local,
        bare=np.zeros(0, dtype=np.int64) if interchangeable else bare,
        interchangeable=interchangeable,
        gap=gap,
    )


def _counted_together(problem: Problem, bins: IntArray, module: int) -> list[IntArray]:
    """Sets of positions in `bins` whose load of a module counts as one."""
    if module not in problem.grouped_modules:
        return [np.array([position]) for position in range(len(bins))]
    groups = problem.group_of[bins]
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def _least_peak(costs: IntArray, base: IntArray, scale: FloatArray, columns: list[list[IntArray]]) -> int:
    """Lower bound on the peak in integer units: the mean over the sets, less what rounding may take."""
    bounds, num_free = [0], costs.shape[1]
    for module, sets in enumerate(columns):
        first = np.array([together[0] for together in sets])
        weights = scale[first, module]
        if (weights == weights[0]).all():
            total = int(base[first, module].sum() + costs[0, :, module].sum())
            bounds.append(-(-total // len(first)))
            continue
        staying_s, free_s = base[first, module] * weights, costs[0, :, module] * scale[0, module]
        total_s = float(staying_s.sum() + free_s.sum())
        bounds.append(int(total_s / float(weights.sum())) - 2 * num_free - 2)
    return max(bounds)


def _first_appearance(local: IntArray) -> IntArray:
    """Rename bins in the order in which they first appear, which the symmetry breaking needs."""
    labels: dict[int, int] = {}
    return np.array([labels.setdefault(int(index), len(labels)) for index in local], dtype=np.int64)


def present_loads(group: Group) -> IntArray:
    """Loads of the hint, shape (num_group_bins, num_modules)."""
    present: IntArray = group.base.copy()
    for module, sets in enumerate(group.columns):
        for together in sets:
            free = np.isin(group.hint, together)
            present[together, module] += group.costs[together[0], free, module].sum()
    return present
