"""Large-neighbourhood search with CP-SAT, seeded by LPT.

One model over all samples and bins is worse than LPT from about 128 samples, so the solver only
ever sees the fullest bin with a few others. Small problems are solved by one exact model.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.descent import BinLoads, descend
from dflop_ds.scheduling.problem import Assignment, FloatArray, IntArray, Problem

logger = logging.getLogger(__name__)

_EXACT_SAMPLES = 24
_EXACT_BINS = 6
_LARGEST_INTEGER = 2**30
_MAX_FREE_SAMPLES = 64
_NEIGHBOURHOOD_TIME_S = 0.02
_NEIGHBOURHOOD_GAP = 5e-4
_MAX_STALLED = 16
_ENOUGH_RATIO = 1.0 + 5e-4
_ROUNDS_PER_BIN = 2
_POLISH_ROUNDS = 128
_SOLVED = (cp_model.OPTIMAL, cp_model.FEASIBLE)


@dataclasses.dataclass(frozen=True)
class CpSatResult:
    """What the search returned.

    Attributes
    ----------
    assignment : Assignment
        Never with a larger largest bin than the seed.
    failure : str or None
        Why the solver gave nothing and the seed is returned.
    """

    assignment: Assignment
    failure: str | None


@dataclasses.dataclass(frozen=True)
class _Group:
    """A sub-problem: some bins, of which some samples may change place.

    ``costs`` [num_free, num_modules], ``base`` [num_group_bins, num_modules] loads of the samples that
    stay, ``sizes`` [num_free, num_caps], ``room`` [num_group_bins, num_caps]; all scaled to integers.
    ``hint`` [num_free] is the present bin of each free sample. Free samples are in order of
    decreasing cost.
    """

    costs: IntArray
    base: IntArray
    sizes: IntArray
    room: IntArray
    hint: IntArray
    interchangeable: bool
    gap: float


class _Budget:
    """Deterministic time left, with a wall-clock deadline as a safety."""

    def __init__(self, deterministic_time_s: float, deadline_s: float) -> None:
        self.left_s = deterministic_time_s
        self._deadline_s = time.perf_counter() + deadline_s

    @property
    def wall_left_s(self) -> float:
        return self._deadline_s - time.perf_counter()

    @property
    def spent(self) -> bool:
        # A solve that returns into an interpreter that has shut down aborts the process, so a background
        # search ends as soon as the main thread has.
        return self.left_s <= 0.0 or self.wall_left_s <= 0.0 or not threading.main_thread().is_alive()


def improve(
    problem: Problem,
    seed: Assignment,
    *,
    deterministic_time_s: float = 1.0,
    deadline_s: float = 30.0,
    random_seed: int = 0,
) -> CpSatResult:
    """Lower the largest bin of `seed` with CP-SAT.

    The result is a pure function of the arguments as long as the wall-clock deadline is not met.

    Parameters
    ----------
    problem : Problem
    seed : Assignment
        A valid assignment of `problem`.
    deterministic_time_s : float
        Budget in CP-SAT's deterministic seconds, which do not depend on the machine.
    deadline_s : float
        Wall-clock limit, a safety only: meeting it makes the result depend on the machine.
    random_seed : int
        Seed of the solver and of the choice of neighbourhoods.

    Raises
    ------
    SchedulingError
        If `seed` is not an assignment of `problem`.
    InfeasibleError
        If `seed` breaks a cap.
    """
    seed.validate(problem)
    state = BinLoads(problem, seed.bin_of())
    bound_s, seed_peak_s = lower_bound_s(problem), float(state.loads_s.max())
    if problem.num_bins == 1 or seed_peak_s <= bound_s:
        return CpSatResult(seed, None)
    budget = _Budget(deterministic_time_s, deadline_s)
    if problem.num_samples <= _EXACT_SAMPLES and problem.num_bins <= _EXACT_BINS:
        failure = _solve_exactly(state, budget, random_seed)
    else:
        failure = _search(state, budget, bound_s, np.random.default_rng(random_seed))
    if failure is not None:
        return CpSatResult(seed, failure)
    if budget.wall_left_s <= 0.0:
        logger.info("the wall-clock deadline ended the CP-SAT search: this assignment is not reproducible")
    descend(state, _POLISH_ROUNDS)
    return CpSatResult(Assignment.from_bin_of(state.bin_of, problem.num_bins), None)


def _solve_exactly(state: BinLoads, budget: _Budget, random_seed: int) -> str | None:
    """Solve the whole problem as one model, in place; returns the failure, if any."""
    bins = np.arange(state.problem.num_bins)
    samples = _by_cost(state.problem, np.arange(state.problem.num_samples))
    group = _make_group(state, bins, samples, gap=0.0)
    status, places = _solve_group(group, budget, budget.left_s, random_seed)
    if places is None:
        return f"CP-SAT returned {status} for the exact model"
    _accept(state, samples, bins[places])
    return None


def _search(state: BinLoads, budget: _Budget, bound_s: float, rng: np.random.Generator) -> str | None:
    """Re-solve the fullest bin with others until the budget ends or nothing helps, in place."""
    descend(state, _ROUNDS_PER_BIN * state.problem.num_bins)
    num_stalled, num_solved, status = 0, 0, "nothing"
    while not budget.spent and num_stalled < _MAX_STALLED:
        peaks_s = state.loads_s.max(axis=1)
        if peaks_s.max() <= bound_s * _ENOUGH_RATIO:
            return None
        bins = _neighbourhood(state, peaks_s, num_stalled, rng)
        samples = _by_cost(state.problem, _free_samples(state, bins, rng))
        group = _make_group(state, bins, samples, gap=_NEIGHBOURHOOD_GAP)
        status, places = _solve_group(group, budget, _NEIGHBOURHOOD_TIME_S, int(rng.integers(2**31 - 1)))
        if status == "MODEL_INVALID":
            return "CP-SAT returned MODEL_INVALID for a neighbourhood"
        improved = places is not None and _accept(state, samples, bins[places])
        num_solved += places is not None
        num_stalled = 0 if improved else num_stalled + 1
    return None if num_solved else f"CP-SAT returned {status} for every neighbourhood"


def _neighbourhood(
    state: BinLoads, peaks_s: FloatArray, num_stalled: int, rng: np.random.Generator
) -> IntArray:
    """The fullest bin with two (after a stall three) others: the emptiest and random ones."""
    fullest = int(peaks_s.argmax())
    others = np.delete(np.arange(len(peaks_s)), fullest)
    num_others = min(len(others), 2 if num_stalled < 2 else 3)
    emptiest = others[np.argsort(state.loads_s[others].sum(axis=1), kind="stable")]
    if num_stalled:
        emptiest = rng.permutation(emptiest[: max(num_others, 4 * num_stalled * num_others)])
    first = emptiest[: num_others - 1]
    last = rng.choice(np.setdiff1d(others, first))
    return np.sort(np.concatenate([[fullest], first, [last]]).astype(np.int64))


def _free_samples(state: BinLoads, bins: IntArray, rng: np.random.Generator) -> IntArray:
    samples = np.flatnonzero(np.isin(state.bin_of, bins))
    if len(samples) <= _MAX_FREE_SAMPLES:
        return samples
    return np.sort(rng.choice(samples, _MAX_FREE_SAMPLES, replace=False))


def _by_cost(problem: Problem, samples: IntArray) -> IntArray:
    return samples[np.argsort(-problem.costs_s[samples].max(axis=1), kind="stable")]


def _make_group(state: BinLoads, bins: IntArray, samples: IntArray, *, gap: float) -> _Group:
    problem = state.problem
    local = np.searchsorted(bins, state.bin_of[samples])
    costs_s = problem.costs_s[samples]
    base_s = state.loads_s[bins].copy()
    used = state.used[bins].copy()
    np.subtract.at(base_s, local, costs_s)
    np.subtract.at(used, local, problem.sizes[samples])
    unit_s = float(state.loads_s[bins].sum(axis=0).max()) / _LARGEST_INTEGER
    size_unit = 1 + problem.caps // _LARGEST_INTEGER
    interchangeable = len(samples) == int(np.isin(state.bin_of, bins).sum())
    if interchangeable:
        base_s[:] = 0.0
        local = _first_appearance(local)
    return _Group(
        costs=np.rint(costs_s / unit_s).astype(np.int64),
        base=np.rint(np.maximum(base_s, 0.0) / unit_s).astype(np.int64),
        sizes=-(-problem.sizes[samples] // size_unit),
        room=(problem.caps - used) // size_unit,
        hint=local,
        interchangeable=interchangeable,
        gap=gap,
    )


def _first_appearance(local: IntArray) -> IntArray:
    """Rename bins in the order in which they first appear, which the symmetry breaking needs."""
    labels: dict[int, int] = {}
    return np.array([labels.setdefault(int(index), len(labels)) for index in local], dtype=np.int64)


def _solve_group(
    group: _Group, budget: _Budget, time_s: float, random_seed: int
) -> tuple[str, npt.NDArray[np.int64] | None]:
    """Status and, if there is a solution, the bin of each free sample within the group."""
    model, places = _build_model(group)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = random_seed
    solver.parameters.max_deterministic_time = min(time_s, budget.left_s)
    solver.parameters.max_time_in_seconds = max(budget.wall_left_s, 1e-3)
    solver.parameters.relative_gap_limit = group.gap
    if group.gap > 0.0:
        solver.parameters.linearization_level = 0  # the relaxation is the mean load, which the model states
    status = solver.solve(model)
    budget.left_s -= max(solver.response_proto.deterministic_time, 1e-4)
    if status not in _SOLVED:
        return str(solver.status_name(status)), None
    chosen = [next(b for b, place in enumerate(row) if solver.boolean_value(place)) for row in places]
    return str(solver.status_name(status)), np.array(chosen, dtype=np.int64)


def _build_model(group: _Group) -> tuple[cp_model.CpModel, list[list[cp_model.IntVar]]]:
    num_free, num_modules = group.costs.shape
    num_bins = len(group.base)
    model = cp_model.CpModel()
    places = [[model.new_bool_var("") for _ in range(num_bins)] for _ in range(num_free)]
    present = group.base.copy()
    np.add.at(present, group.hint, group.costs)
    mean = -(-int(present.sum(axis=0).max()) // num_bins)
    peak = model.new_int_var(mean, int(present.max()), "peak")
    for row, hint in zip(places, group.hint, strict=True):
        model.add_exactly_one(row)
        for index, place in enumerate(row):
            model.add_hint(place, index == hint)
    for index in range(num_bins):
        column = [row[index] for row in places]
        for module in range(num_modules):
            weights = group.costs[:, module].tolist()
            load = cp_model.LinearExpr.weighted_sum(column, weights) + int(group.base[index, module])
            model.add(load <= peak)
            if group.gap > 0.0:  # the cheaper modules keep their balance
                model.add(load <= int(present[:, module].max()))
        for cap in range(group.sizes.shape[1]):
            taken = cp_model.LinearExpr.weighted_sum(column, group.sizes[:, cap].tolist())
            model.add(taken <= int(group.room[index, cap]))
    if group.interchangeable:
        _break_symmetry(model, places)
    model.minimize(peak)
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


def _accept(state: BinLoads, samples: IntArray, bins: IntArray) -> bool:
    """Take the new places if, in seconds, they lower the largest load of the bins concerned."""
    before = state.bin_of[samples]
    touched = np.unique(np.concatenate([before, bins]))
    old_s = state.loads_s[touched].max()
    state.reassign(samples, bins)
    if state.loads_s[touched].max() < old_s and (state.used <= state.problem.caps).all():
        return True
    state.reassign(samples, before)
    return False
