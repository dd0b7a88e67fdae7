"""The one entry to the solvers."""

from __future__ import annotations

import functools
import logging
import time

from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.assignment import Assignment, Solution, scaled_loads_s
from dflop_ds.scheduling.blind import solve_blind
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.lpt import solve_lpt
from dflop_ds.scheduling.problem import Problem

logger = logging.getLogger(__name__)

POLICIES = ("blind", "lpt", "cp_sat")


def solve(
    problem: Problem,
    *,
    policy: str = "cp_sat",
    deterministic_time_s: float = 1.0,
    deadline_s: float = 30.0,
    seed: int = 0,
    num_workers: int = 1,
) -> Solution:
    """Put the samples of a global batch into bins.

    A failure of CP-SAT is not an error: the LPT assignment is returned with the reason, which is logged
    as a warning once.

    Parameters
    ----------
    problem : Problem
    policy : {"blind", "lpt", "cp_sat"}
        By position; longest first; longest first improved by CP-SAT.
    deterministic_time_s : float
        Budget of "cp_sat" in the solver's deterministic seconds.
    deadline_s : float
        Wall-clock safety limit of "cp_sat", seconds.
    seed : int
        Seed of "cp_sat".
    num_workers : int
        Searches that "cp_sat" runs at the same time, in threads; the result depends on their number, not on
        their timing.

    Raises
    ------
    SchedulingError
        If the policy is unknown or a limit is not positive.
    InfeasibleError
        If no assignment within the caps is found.
    """
    if policy not in POLICIES:
        raise SchedulingError(f"policy must be one of {POLICIES}, found {policy!r}. Choose one of them.")
    if not (deterministic_time_s > 0 and deadline_s > 0):
        raise SchedulingError(
            f"deterministic_time_s and deadline_s must be positive, found {deterministic_time_s} and "
            f'{deadline_s}. Use the policy "lpt" to skip the solver.'
        )
    if num_workers < 1:
        raise SchedulingError(f"num_workers must be at least 1, found {num_workers}. Give the cores to use.")
    started_s = time.perf_counter()
    if policy == "blind":
        return _solution(problem, solve_blind(problem), "blind", started_s, None)
    assignment = solve_lpt(problem)
    if policy == "lpt":
        return _solution(problem, assignment, "lpt", started_s, None)
    try:
        from dflop_ds.scheduling.neighbourhood import improve

        result = improve(
            problem,
            assignment,
            deterministic_time_s=deterministic_time_s,
            deadline_s=max(1e-3, deadline_s - (time.perf_counter() - started_s)),
            random_seed=seed,
            num_workers=num_workers,
        )
        result.assignment.validate(problem)
        failure = result.failure
    except Exception as error:
        logger.debug("CP-SAT failed", exc_info=True)
        failure = f"CP-SAT raised {type(error).__name__}: {error}"
    if failure is not None:
        _warn_once(failure)
        return _solution(problem, assignment, "lpt", started_s, failure)
    solver = "optimal" if result.is_optimal else "cp_sat"
    return _solution(problem, result.assignment, solver, started_s, None)


def _solution(
    problem: Problem, assignment: Assignment, solver: str, started_s: float, fallback_reason: str | None
) -> Solution:
    largest_s = float(scaled_loads_s(problem, assignment.bin_of()).max())
    bound_s = min(lower_bound_s(problem), largest_s)  # sums in another order may differ in the last digit
    ratio = largest_s / bound_s if bound_s > 0 else 1.0
    return Solution(
        assignment, largest_s, bound_s, ratio, solver, time.perf_counter() - started_s, fallback_reason
    )


@functools.lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    logger.warning(
        "scheduling falls back to LPT: %s. Training goes on with a slightly less even split.", reason
    )
