"""Large-neighbourhood search with CP-SAT, seeded by LPT.

One model over all samples and bins is worse than LPT from about 128 samples, so the solver only
ever sees the fullest bin with a few others. Small problems are solved by one exact model, which may prove
its result optimal. Very many bins are first split into blocks, each searched for itself.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from dflop_ds.scheduling.assignment import Assignment, scaled_loads_s
from dflop_ds.scheduling.blocks import block_problem, split_bins
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.cp_sat import solve_group
from dflop_ds.scheduling.descent import BinLoads, descend
from dflop_ds.scheduling.group import Group, make_group
from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem
from dflop_ds.scheduling.sweep import sweep

logger = logging.getLogger(__name__)

_EXACT_SAMPLES = 24
_EXACT_BINS = 6
_MAX_FREE_SAMPLES = 64
_NEIGHBOURHOOD_TIME_S = 0.02
_NEIGHBOURHOOD_GAP = 5e-4
_MAX_STALLED = 16
_ENOUGH_RATIO = 1.0 + 5e-4
_ROUNDS_PER_BIN = 2
_MOST_DESCENT_ROUNDS = 256
_POLISH_ROUNDS = 128
_SWEEPS = 64
_LEAST_SWEEPS = 4
_SWEEP_ENTRY_S = 3e-8
_LEAST_SPENT_S = 1e-4


@dataclasses.dataclass(frozen=True)
class CpSatResult:
    """What the search returned.

    Attributes
    ----------
    assignment : Assignment
        Never with a larger largest bin than the seed.
    failure : str or None
        Why the solver gave nothing and the seed is returned.
    is_optimal : bool
        No assignment has a smaller largest bin: proved by the exact model, to nine digits, or by the bound.
    """

    assignment: Assignment
    failure: str | None
    is_optimal: bool = False


class _Budget:
    """Deterministic time left, with a wall-clock deadline as a safety."""

    def __init__(self, deterministic_time_s: float, end_s: float) -> None:
        self.left_s = deterministic_time_s
        self.end_s = end_s

    @property
    def wall_left_s(self) -> float:
        return self.end_s - time.perf_counter()

    @property
    def spent(self) -> bool:
        # A solve that returns into an interpreter that has shut down aborts the process, so a background
        # search ends as soon as the main thread has.
        return self.left_s <= 0.0 or self.wall_left_s <= 0.0 or not threading.main_thread().is_alive()


@dataclasses.dataclass(frozen=True)
class _Found:
    """Outcome of one search: bins of the samples, and what the solver said."""

    bin_of: IntArray
    failure: str | None = None
    is_optimal: bool = False


def improve(
    problem: Problem,
    seed: Assignment,
    *,
    deterministic_time_s: float = 1.0,
    deadline_s: float = 30.0,
    random_seed: int = 0,
    num_workers: int = 1,
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
    num_workers : int
        Searches that run at the same time, each with the whole budget: on blocks of bins where there are
        several, otherwise with other seeds, of which the best result is taken.

    Raises
    ------
    SchedulingError
        If `seed` is not an assignment of `problem`.
    InfeasibleError
        If `seed` breaks a cap.
    """
    seed.validate(problem)
    bin_of, bound_s = seed.bin_of(), lower_bound_s(problem)
    seed_peak_s = float(scaled_loads_s(problem, bin_of).max())
    if problem.num_bins == 1 or seed_peak_s <= bound_s:
        return CpSatResult(seed, None, is_optimal=True)
    end_s = time.perf_counter() + deadline_s
    blocks = split_bins(problem, bin_of)
    if len(blocks) > 1:
        share = min(num_workers, len(blocks)) / len(blocks)
        found = _search_blocks(
            problem, bin_of, blocks, share * deterministic_time_s, deadline_s, random_seed, num_workers
        )
    else:

        def search(worker: int) -> _Found:
            budget = _Budget(deterministic_time_s, end_s)
            return _improve_once(problem, bin_of, bound_s, budget, random_seed + worker)

        # The least peak of the lowest worker, so that the result does not depend on who is first.
        tries = _in_threads([functools.partial(search, worker) for worker in range(num_workers)], num_workers)
        found = min(tries, key=lambda one: float(scaled_loads_s(problem, one.bin_of).max()))
    if found.failure is not None:
        return CpSatResult(seed, found.failure)
    if time.perf_counter() >= end_s:
        logger.info("the wall-clock deadline ended the CP-SAT search: this assignment is not reproducible")
    proved = found.is_optimal or float(scaled_loads_s(problem, found.bin_of).max()) <= bound_s
    return CpSatResult(Assignment.from_bin_of(found.bin_of, problem.num_bins), None, proved)


def _in_threads(tasks: list[Callable[[], _Found]], num_workers: int) -> list[_Found]:
    if num_workers == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda task: task(), tasks))


def _search_blocks(
    problem: Problem,
    bin_of: IntArray,
    blocks: list[IntArray],
    deterministic_time_s: float,
    deadline_s: float,
    random_seed: int,
    num_workers: int,
) -> _Found:
    """Search every block of bins for itself."""
    end_s = time.perf_counter() + deadline_s
    bin_of = sweep(problem, bin_of, _SWEEPS, random_seed, end_s=end_s)
    blocks = split_bins(problem, bin_of)
    parts = [block_problem(problem, bin_of, bins) for bins in blocks]
    wall_s = max(0.0, end_s - time.perf_counter()) * num_workers / len(blocks)

    def search(index: int) -> _Found:
        part, places = parts[index].problem, parts[index].bin_of
        budget = _Budget(deterministic_time_s, min(end_s, time.perf_counter() + wall_s))
        return _improve_once(part, places, lower_bound_s(part), budget, random_seed + index)

    found = _in_threads([functools.partial(search, index) for index in range(len(blocks))], num_workers)
    result = bin_of.copy()
    for part, bins, one in zip(parts, blocks, found, strict=True):
        result[part.samples] = bins[one.bin_of]
    failures = [one.failure for one in found if one.failure is not None]
    return _Found(result, failures[0] if len(failures) == len(found) else None)


def _improve_once(
    problem: Problem, bin_of: IntArray, bound_s: float, budget: _Budget, random_seed: int
) -> _Found:
    """Solve a small problem exactly, search a larger one; the assignment is the given one after a failure."""
    state, optimal = BinLoads(problem, bin_of), False
    if problem.num_samples <= _EXACT_SAMPLES and problem.num_bins <= _EXACT_BINS:
        failure, optimal = _solve_exactly(state, budget, random_seed)
    else:
        rounds = _affordable_sweeps(problem, budget)
        state = BinLoads(problem, sweep(problem, bin_of, rounds, random_seed, end_s=budget.end_s))
        failure = _search(state, budget, bound_s, np.random.default_rng(random_seed))
    if failure is not None:
        return _Found(bin_of, failure)
    if not optimal:
        descend(state, _POLISH_ROUNDS, end_s=budget.end_s)
    return _Found(state.bin_of, None, optimal)


def _affordable_sweeps(problem: Problem, budget: _Budget) -> int:
    """Sweeps for at most half the budget, by a fixed estimate, which they are charged."""
    pairs = problem.num_bins // 2 * (1 + 2 * problem.num_samples // problem.num_bins) ** 2
    each_s = _SWEEP_ENTRY_S * max(1, pairs) * (problem.num_modules + problem.num_caps)
    rounds = max(_LEAST_SWEEPS, min(_SWEEPS, int(0.5 * budget.left_s / each_s)))
    budget.left_s -= rounds * each_s
    return rounds


def _solve_exactly(state: BinLoads, budget: _Budget, random_seed: int) -> tuple[str | None, bool]:
    """Solve the whole problem as one model, in place; returns the failure, if any, and whether it is optimal.

    Of the assignments with the least peak, the one with the least sum of the modules' peaks is taken.
    """
    bins = np.arange(state.problem.num_bins)
    samples = _by_cost(state.problem, np.arange(state.problem.num_samples))
    group = make_group(state, bins, samples, gap=0.0)
    status, places = _solve(group, budget, budget.left_s, random_seed)
    if places is None:
        return f"CP-SAT returned {status} for the exact model", False
    _accept(state, samples, bins[places])
    optimal = status == "OPTIMAL"
    if optimal and state.problem.num_modules > 1 and not budget.spent:
        group = make_group(state, bins, samples, gap=0.0)
        _, places = _solve(group, budget, budget.left_s, random_seed, second_objective=True)
        if places is not None:
            _accept(state, samples, bins[places], by_sum=True)
    return None, optimal


def _search(state: BinLoads, budget: _Budget, bound_s: float, rng: np.random.Generator) -> str | None:
    """Re-solve the fullest bin with others until the budget ends or nothing helps, in place."""
    rounds = min(_MOST_DESCENT_ROUNDS, _ROUNDS_PER_BIN * state.problem.num_bins)
    descend(state, rounds, end_s=budget.end_s)
    num_stalled, num_solved, status = 0, 0, ""
    while not budget.spent and num_stalled < _MAX_STALLED:
        peaks_s = state.loads_s.max(axis=1)
        if peaks_s.max() <= bound_s * _ENOUGH_RATIO:
            return None
        bins = _neighbourhood(state, peaks_s, num_stalled, rng)
        samples = _by_cost(state.problem, _free_samples(state, bins, rng))
        group = make_group(state, bins, samples, gap=_NEIGHBOURHOOD_GAP)
        status, places = _solve(group, budget, _NEIGHBOURHOOD_TIME_S, int(rng.integers(2**31 - 1)))
        if status == "MODEL_INVALID":
            return "CP-SAT returned MODEL_INVALID for a neighbourhood"
        improved = places is not None and _accept(state, samples, bins[places])
        num_solved += places is not None
        num_stalled = 0 if improved else num_stalled + 1
    if num_solved or not status or budget.wall_left_s <= 0.0:
        return None  # without an attempt the sweeps have used the budget
    return f"CP-SAT returned {status} for every neighbourhood"


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


def _solve(
    group: Group, budget: _Budget, time_s: float, random_seed: int, *, second_objective: bool = False
) -> tuple[str, IntArray | None]:
    """Status and, if there is a solution, the bin of each free sample within the group."""
    found = solve_group(
        group,
        deterministic_time_s=min(time_s, budget.left_s),
        wall_time_s=max(budget.wall_left_s, 1e-3),
        random_seed=random_seed,
        second_objective=second_objective,
    )
    budget.left_s -= max(found.spent_s, _LEAST_SPENT_S)
    return found.status, found.places


def _accept(state: BinLoads, samples: IntArray, bins: IntArray, *, by_sum: bool = False) -> bool:
    """Take the new places if, in seconds, they lower the largest load of the bins concerned.

    With `by_sum`, if they lower the sum of the modules' largest loads and do not raise the largest.
    """
    before = state.bin_of[samples]
    touched = np.unique(np.concatenate([before, bins]))
    if state.problem.grouped_modules:
        touched = np.arange(state.problem.num_bins)
    old_s = state.loads_s[touched]
    state.reassign(samples, bins)
    new_s = state.loads_s[touched]
    better = new_s.max() < old_s.max()
    if by_sum:
        better = new_s.max() <= old_s.max() and new_s.max(axis=0).sum() < old_s.max(axis=0).sum()
    if better and (state.used <= state.problem.limit_caps).all():
        return True
    state.reassign(samples, before)
    return False
