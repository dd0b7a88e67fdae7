"""A few bins as one CP-SAT model."""

from __future__ import annotations

import dataclasses

import numpy as np
from ortools.sat.python import cp_model

from dflop_ds.scheduling.group import Group, present_loads
from dflop_ds.scheduling.problem import IntArray

_SOLVED = (cp_model.OPTIMAL, cp_model.FEASIBLE)


@dataclasses.dataclass(frozen=True)
class GroupSolution:
    """What the solver made of a group.

    Attributes
    ----------
    status : str
        CP-SAT's name of the outcome, such as "OPTIMAL".
    places : ndarray of int64, shape (num_free,), or None
        Bin of each free sample within the group; None without a solution.
    spent_s : float
        Deterministic seconds that it took.
    """

    status: str
    places: IntArray | None
    spent_s: float


def solve_group(
    group: Group,
    *,
    deterministic_time_s: float,
    wall_time_s: float,
    random_seed: int,
    second_objective: bool = False,
) -> GroupSolution:
    """Lower the peak of a group, or with `second_objective` the sum of its modules' peaks.

    Parameters
    ----------
    group : Group
    deterministic_time_s, wall_time_s : float
        Limits; the result is reproducible as long as the second one is not met.
    random_seed : int
    second_objective : bool
    """
    model, places = _build_model(group, second_objective=second_objective)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = random_seed
    solver.parameters.max_deterministic_time = deterministic_time_s
    solver.parameters.max_time_in_seconds = wall_time_s
    solver.parameters.relative_gap_limit = group.gap
    if group.gap > 0.0:
        solver.parameters.linearization_level = 0  # the relaxation is the mean load, which the model states
    status = solver.solve(model)
    name, spent_s = str(solver.status_name(status)), float(solver.response_proto.deterministic_time)
    if status not in _SOLVED:
        return GroupSolution(name, None, spent_s)
    chosen = [next(b for b, place in enumerate(row) if solver.boolean_value(place)) for row in places]
    return GroupSolution(name, np.array(chosen, dtype=np.int64), spent_s)


def _build_model(
    group: Group, *, second_objective: bool
) -> tuple[cp_model.CpModel, list[list[cp_model.IntVar]]]:
    """Least peak; as second objective, the least sum of the modules' peaks under the hint's peak."""
    num_bins, num_free, num_modules = group.costs.shape
    model = cp_model.CpModel()
    places = [[model.new_bool_var("") for _ in range(num_bins)] for _ in range(num_free)]
    present = present_loads(group)
    largest = int(present.max())
    peaks = [model.new_int_var(min(group.mean, largest), largest, "peak")]
    if second_objective:
        peaks = [model.new_int_var(0, largest, "") for _ in range(num_modules)]
    for row, hint in zip(places, group.hint, strict=True):
        model.add_exactly_one(row)
        for index, place in enumerate(row):
            model.add_hint(place, index == hint)
    for module, sets in enumerate(group.columns):
        peak = peaks[module % len(peaks)]
        for together in sets:
            columns = [row[index] for index in together for row in places]
            weights = np.tile(group.costs[together[0], :, module], len(together)).tolist()
            load = cp_model.LinearExpr.weighted_sum(columns, weights) + int(group.base[together[0], module])
            model.add(load <= peak)
            if group.gap > 0.0:  # the cheaper modules keep their balance
                model.add(load <= int(present[:, module].max()))
    for index in range(num_bins):
        column = [row[index] for row in places]
        for limit in range(group.sizes.shape[1]):
            taken = cp_model.LinearExpr.weighted_sum(column, group.sizes[:, limit].tolist())
            model.add(taken <= int(group.room[index, limit]))
    for index in group.bare:
        model.add_at_least_one([row[index] for row in places])
    if group.interchangeable:
        _break_symmetry(model, places)
    model.minimize(sum(peaks))
    return model, places


def _break_symmetry(model: cp_model.CpModel, places: list[list[cp_model.IntVar]]) -> None:
    """Bins are alike: sample ``i`` may only use the first ``i + 1``, and none stays empty needlessly."""
    num_bins = len(places[0])
    for sample, row in enumerate(places[:num_bins]):
        for place in row[sample + 1 :]:
            model.add(place == 0)
    if len(places) >= num_bins:
        for index in range(num_bins):
            model.add_at_least_one([row[index] for row in places])
