"""From a problem to the assignment with the shortest simulated step: ramp, solver, order, skip rule."""

from __future__ import annotations

import dataclasses

import numpy as np

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.assignment import Assignment, Solution
from dflop_ds.scheduling.ordering import MAX_ROUNDS, order_bins, step_makespan_s
from dflop_ds.scheduling.problem import FloatArray, Problem
from dflop_ds.scheduling.ramp import ramp_weights
from dflop_ds.scheduling.solve import solve

_RELATIVE_GAIN = 1e-9


@dataclasses.dataclass(frozen=True)
class Effort:
    """What `schedule` may spend and when it is worth it.

    Attributes
    ----------
    policy : {"cp_sat", "lpt", "blind"}
    order : bool
        Choose target weights and the order of the bins by simulation.
    min_gain : float
        Least predicted gain over the data-blind order, a share of its step time; below it that order is kept.
    deterministic_time_s, deadline_s, seed, num_workers
        As in :func:`dflop_ds.scheduling.solve.solve`.
    """

    policy: str = "cp_sat"
    order: bool = True
    min_gain: float = 0.0
    deterministic_time_s: float = 0.1
    deadline_s: float = 30.0
    seed: int = 0
    num_workers: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain < 1.0:
            raise SchedulingError(f"min_gain must be in [0, 1), found {self.min_gain}. Correct it.")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An assignment in the order to run it, with its predicted times.

    Attributes
    ----------
    assignment : Assignment
    solution : Solution
        Before its bins were put into order.
    weights : tuple of float
        Target weights of the microbatches; all 1.0 without a ramp.
    makespan_s : float
        Simulated step of the slowest replica, seconds.
    blind_makespan_s : float or None
        Same for the data-blind order; None where the caps forbid that order.
    kept_blind : bool
        The gain was below `min_gain`.
    """

    assignment: Assignment
    solution: Solution
    weights: tuple[float, ...]
    makespan_s: float
    blind_makespan_s: float | None
    kept_blind: bool = False

    @property
    def gain(self) -> float | None:
        """Share of the data-blind step time that is saved."""
        if self.blind_makespan_s is None:
            return None
        return 1.0 - self.makespan_s / self.blind_makespan_s if self.blind_makespan_s > 0 else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    problem: Problem
    forward_s: FloatArray
    backward_s: FloatArray
    effort: Effort

    def solved(self, policy: str, weights: tuple[float, ...], *, swaps: bool = True) -> Schedule:
        """Solve for these weights, put the bins into order, without `swaps` a simple one, simulate."""
        effort, problem = self.effort, self.problem
        if weights != (1.0,) * problem.num_microbatches:
            problem = dataclasses.replace(problem, bin_weights=np.tile(weights, problem.num_replicas))
        solution = solve(
            problem,
            policy=policy,
            deterministic_time_s=effort.deterministic_time_s,
            deadline_s=effort.deadline_s,
            seed=effort.seed,
            num_workers=effort.num_workers,
        )
        assignment = solution.assignment
        # Only replicas of one speed and without groups may exchange their bins.
        movable = not problem.replica_speeds.size and not problem.grouped_modules
        if policy != "blind" and effort.order and movable:
            assignment = order_bins(
                assignment,
                forward_s=self.forward_s,
                backward_s=self.backward_s,
                num_replicas=problem.num_replicas,
                num_microbatches=problem.num_microbatches,
                max_rounds=MAX_ROUNDS if swaps else 0,
            )
        makespan_s = step_makespan_s(
            assignment,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            num_replicas=problem.num_replicas,
            num_microbatches=problem.num_microbatches,
            replica_speeds=problem.replica_speeds,
        )
        return Schedule(assignment, solution, weights, makespan_s, None)


def schedule(problem: Problem, forward_s: FloatArray, backward_s: FloatArray, effort: Effort) -> Schedule:
    """Assign and order the samples of a global batch for the shortest simulated 1F1B step.

    Equal bins and ramps of two depths are tried with LPT; the solver works on the best of them, and the
    shortest step of all that were found is taken.

    Parameters
    ----------
    problem : Problem
        Without bin weights of its own; its modules are the pipeline stages.
    forward_s, backward_s : ndarray of float64, shape (num_samples, num_stages)
        Predicted seconds of each sample.
    effort : Effort

    Raises
    ------
    SchedulingError, InfeasibleError
        As in :func:`dflop_ds.scheduling.solve.solve`.
    """
    task = _Task(_distinct_modules(problem), forward_s, backward_s, effort)
    flat = (1.0,) * problem.num_microbatches
    if effort.policy == "blind":
        blind = task.solved("blind", flat)
        return dataclasses.replace(blind, blind_makespan_s=blind.makespan_s)
    best = task.solved("lpt", flat, swaps=False)
    if effort.order:
        ramps = [task.solved("lpt", weights, swaps=False) for weights in _ramps(task)]
        best = min([best, *ramps], key=_makespan)
    if effort.policy == "lpt":
        best = task.solved("lpt", best.weights)
    else:
        searched = task.solved("cp_sat", best.weights)
        if not effort.order or searched.makespan_s <= best.makespan_s * (1.0 + _RELATIVE_GAIN):
            best = searched
        else:
            reason = searched.solution.fallback_reason
            best = task.solved("lpt", best.weights)
            best = dataclasses.replace(
                best, solution=dataclasses.replace(best.solution, fallback_reason=reason)
            )
    return _if_worth_it(task, best)


def _distinct_modules(problem: Problem) -> Problem:
    """Without modules that cost every sample what another one does: they bind no bin further."""
    if problem.grouped_modules:
        return problem
    _, first = np.unique(problem.costs_s, axis=1, return_index=True)
    return dataclasses.replace(problem, costs_s=problem.costs_s[:, np.sort(first)])


def _makespan(found: Schedule) -> float:
    return found.makespan_s


def _ramps(task: _Task) -> list[tuple[float, ...]]:
    """Weights worth a try: the best ramp of divisible microbatches, and half as deep."""
    num_bins, count = task.problem.num_bins, task.problem.num_microbatches
    means = [tuple((times.sum(axis=0) / num_bins).tolist()) for times in (task.forward_s, task.backward_s)]
    weights = ramp_weights(means[0], means[1], count)
    if weights == (1.0,) * count:
        return []
    return [weights, tuple((1.0 + weight) / 2.0 for weight in weights)]


def _if_worth_it(task: _Task, best: Schedule) -> Schedule:
    try:
        blind = task.solved("blind", (1.0,) * task.problem.num_microbatches)
    except InfeasibleError:
        return best
    best = dataclasses.replace(best, blind_makespan_s=blind.makespan_s)
    if best.gain is not None and best.gain >= task.effort.min_gain:
        return best
    return dataclasses.replace(blind, blind_makespan_s=blind.makespan_s, kept_blind=True)
