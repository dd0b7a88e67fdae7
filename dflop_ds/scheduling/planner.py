"""From the step number to the plan of that step: pure decisions, no communication."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dflop_ds.config import BatchSizes, DflopConfig
from dflop_ds.cost.model import SampleCosts
from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.assignment import Solution, bin_loads_s
from dflop_ds.scheduling.order import EpochOrder, GlobalBatch
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.schedule import Effort, Schedule, schedule
from dflop_ds.shapes import ShapeTable

logger = logging.getLogger(__name__)

Limit = int | Literal["auto"] | None


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A plan and how it came about.

    Attributes
    ----------
    plan : StepPlan
    batch : GlobalBatch
    solution : Solution
        Before its bins were put into order.
    makespan_s, blind_makespan_s : float or None
        Predicted step, and that of the data-blind order; None where unknown.
    kept_blind : bool
        The predicted gain was below `min_gain`, so the data-blind order was kept.
    bin_costs_s : tuple of float
        Predicted seconds of each bin of the plan in its slowest stage; empty without costs.
    limits : dict
        For each hard limit its "cap" and what each bin has "used".
    """

    plan: StepPlan
    batch: GlobalBatch
    solution: Solution
    makespan_s: float | None = None
    blind_makespan_s: float | None = None
    kept_blind: bool = False
    bin_costs_s: tuple[float, ...] = ()
    limits: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepPlanner:
    """Makes the plan of any step from shapes, costs and settings.

    Attributes
    ----------
    table : ShapeTable
        Shapes of the usable samples.
    rows : ndarray of int64, shape (n,)
        Data set index of each row of ``table``.
    order : EpochOrder
    num_replicas, num_microbatches, micro_batch_size : int
        Data-parallel replicas, microbatches of a full step and samples per microbatch, from
        DeepSpeed's own configuration.
    costs : SampleCosts or None
        Per-sample seconds per pipeline stage; may be ``None`` for the policy ``blind``.
    policy : {"cp_sat", "lpt", "blind"}
    reduction : {"token", "sample"}
    max_tokens, max_encoder_inputs : int, "auto" or None
        Hard limits of one bin. ``auto`` bounds a bin to twice the average, to the largest sample,
        or to what the batch needs to fit at all, whichever is most.
    reorder : bool
        Choose target weights and the order of the bins by simulated makespan.
    deterministic_time_s : float
        Solver effort per step.
    seed : int
    min_gain : float
        Least predicted gain over the data-blind order, a share of its step time, at which it is left.
    num_workers : int
        Searches that run at the same time.
    replica_speeds : tuple of float
        Relative speed of each replica; empty: all alike.
    """

    table: ShapeTable
    rows: npt.NDArray[np.int64]
    order: EpochOrder
    num_replicas: int
    num_microbatches: int
    micro_batch_size: int
    costs: SampleCosts | None
    policy: str = "cp_sat"
    reduction: str = "token"
    max_tokens: Limit = None
    max_encoder_inputs: Limit = None
    reorder: bool = True
    deterministic_time_s: float = 0.1
    seed: int = 0
    min_gain: float = 0.0
    num_workers: int = 1
    replica_speeds: tuple[float, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: DflopConfig,
        sizes: BatchSizes,
        *,
        table: ShapeTable,
        rows: npt.NDArray[np.int64],
        num_replicas: int,
        costs: SampleCosts | None,
    ) -> StepPlanner:
        """Planner of a run with this configuration; the other parameters are attributes of the class."""
        order = EpochOrder(
            num_samples=len(table),
            batch_size=sizes.train_batch_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            tail=config.data.tail,
        )
        return cls(
            table=table,
            rows=rows,
            order=order,
            num_replicas=num_replicas,
            num_microbatches=sizes.num_microbatches,
            micro_batch_size=sizes.micro_batch_size,
            costs=costs,
            policy=config.scheduler.policy,
            reduction=config.loss.reduction,
            max_tokens=config.scheduler.max_tokens_per_microbatch,
            max_encoder_inputs=config.scheduler.max_encoder_inputs_per_microbatch,
            reorder=config.scheduler.order,
            deterministic_time_s=config.scheduler.deterministic_time_s,
            seed=config.seed,
            min_gain=config.scheduler.min_gain,
            num_workers=config.scheduler.solver_workers,
        )

    def plan(self, step: int) -> PlannedStep:
        """Plan of optimizer step ``step``, by the configured policy."""
        return self._plan(step, self.policy)

    def fallback(self, step: int) -> PlannedStep:
        """Plan made without the solver, for when it is late."""
        return self._plan(step, "blind" if self.policy == "blind" else "lpt")

    def accepts(self, plan: StepPlan) -> bool:
        """Whether a plan that an earlier launch made still fits the data and the settings.

        It must hold the samples of its step, be averaged over as many terms, have at least as many
        microbatches as configured, and keep the limits that are given as numbers.
        """
        batch = self.order.batch(plan.step)
        found = [index for members in plan.bins for index in members]
        if (
            plan.num_replicas != self.num_replicas
            or plan.num_terms != self._num_terms(batch)
            or plan.num_microbatches < self._num_microbatches(len(batch.positions))
            or sorted(found) != sorted(self.rows[batch.positions].tolist())
        ):
            return False
        row_of = dict(zip(self.rows[batch.positions].tolist(), batch.positions.tolist(), strict=True))
        limits = (
            (self.table.llm_tokens, self.max_tokens),
            (self.table.encoder_inputs, self.max_encoder_inputs),
        )
        return not any(
            isinstance(limit, int) and sum(sizes[row_of[index]] for index in members) > limit
            for sizes, limit in limits
            for members in plan.bins
        )

    def fewest_microbatches(self, num_steps: int) -> int:
        """Microbatches per replica that any ``num_steps`` consecutive steps have at least."""
        num_tail = self.order.num_samples % self.order.batch_size if self.order.tail == "partial" else 0
        if num_tail == 0:
            return num_steps * self.num_microbatches
        num_tails = math.ceil(num_steps / self.order.steps_per_epoch)
        return (num_steps - num_tails) * self.num_microbatches + num_tails * self._num_microbatches(num_tail)

    def _num_microbatches(self, num_samples: int) -> int:
        """Microbatches per replica of a step with so many samples, if the limits allow."""
        needed = math.ceil(num_samples / (self.num_replicas * self.micro_batch_size))
        return max(1, min(self.num_microbatches, needed))

    def _plan(self, step: int, policy: str) -> PlannedStep:
        batch = self.order.batch(step)
        problem, found = self._solve(batch, policy)
        bins = found.assignment.bins
        indices = self.rows[batch.positions]
        members = tuple(tuple(int(indices[position]) for position in positions) for positions in bins)
        plan = StepPlan(
            step=step,
            epoch=batch.epoch,
            num_replicas=self.num_replicas,
            num_microbatches=problem.num_microbatches,
            bins=members,
            num_terms=self._num_terms(batch),
        )
        limits = _used_limits(problem, found)
        if self.costs is None:
            return PlannedStep(plan, batch, found.solution, limits=limits)
        bin_costs_s = bin_loads_s(problem, found.assignment).max(axis=1)
        return PlannedStep(
            plan,
            batch,
            found.solution,
            found.makespan_s,
            found.blind_makespan_s,
            found.kept_blind,
            tuple(bin_costs_s.tolist()),
            limits,
        )

    def _solve(self, batch: GlobalBatch, policy: str) -> tuple[Problem, Schedule]:
        """Solve, with more microbatches where the hard limits leave no other way."""
        num_microbatches = self._num_microbatches(len(batch.positions))
        # With a bin for every sample nothing shares a bin, and no limit can be broken.
        most = max(num_microbatches, math.ceil(len(batch.positions) / self.num_replicas))
        while True:
            problem = self._problem(batch, num_microbatches)
            try:
                return problem, self._schedule(batch, problem, policy)
            except InfeasibleError as error:
                fewest = math.ceil((error.min_bins or 0) / self.num_replicas)
                if policy == "blind" or error.min_bins is None or num_microbatches >= most:
                    raise
                num_microbatches = min(most, max(num_microbatches + 1, fewest))
                logger.warning("step %d runs %d microbatches: %s", batch.step, num_microbatches, error)

    def _schedule(self, batch: GlobalBatch, problem: Problem, policy: str) -> Schedule:
        times = (problem.costs_s, problem.costs_s)
        if self.costs is not None:
            times = self.costs.forward_s[batch.positions], self.costs.backward_s[batch.positions]
        effort = Effort(
            policy=policy,
            order=self.reorder,
            min_gain=self.min_gain,
            deterministic_time_s=self.deterministic_time_s,
            seed=self.seed,
            num_workers=self.num_workers,
        )
        return schedule(problem, times[0], times[1], effort)

    def _problem(self, batch: GlobalBatch, num_microbatches: int) -> Problem:
        positions = batch.positions
        if self.costs is not None:
            costs_s = self.costs.forward_s[positions] + self.costs.backward_s[positions]
        elif self.policy == "blind":
            costs_s = np.zeros((len(positions), 1))
        else:
            raise SchedulingError(
                f'the policy "{self.policy}" needs predicted costs, found none; profile the model or '
                f'use "blind".'
            )
        num_bins = self.num_replicas * num_microbatches
        limits = (
            ("tokens", self.table.llm_tokens, self.max_tokens),
            ("encoder inputs", self.table.encoder_inputs, self.max_encoder_inputs),
        )
        names, sizes, caps = [], [], []
        for name, column, limit in limits:
            cap = self._cap(column, positions, limit, num_bins)
            if cap is not None:
                names.append(name)
                sizes.append(column[positions])
                caps.append(cap)
        return Problem(
            costs_s=costs_s,
            num_replicas=self.num_replicas,
            num_microbatches=num_microbatches,
            sizes=np.stack(sizes, axis=1) if sizes else np.zeros((len(positions), 0), dtype=np.int64),
            caps=np.array(caps, dtype=np.int64),
            cap_names=tuple(names),
            sample_ids=tuple(self.table.sample_ids[i] for i in positions),
            replica_speeds=np.array(self.replica_speeds, dtype=np.float64),
        )

    def _cap(
        self, column: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], limit: Limit, num_bins: int
    ) -> int | None:
        if limit is None or isinstance(limit, int):
            return limit
        if self.policy == "blind":
            return None
        usual = 2 * math.ceil(float(column.mean()) * self.micro_batch_size)
        # A batch that is heavy as a whole must still fit: any greedy assignment stays below this.
        greedy = math.ceil(int(column[positions].sum()) / num_bins) + int(column[positions].max())
        return max(usual, int(column.max()), greedy)

    def _num_terms(self, batch: GlobalBatch) -> int:
        targets = self.table.target_tokens[batch.positions]
        return int(targets.sum()) if self.reduction == "token" else int((targets > 0).sum())


def _used_limits(problem: Problem, found: Schedule) -> dict[str, dict[str, Any]]:
    used = np.zeros((problem.num_bins, problem.num_caps), dtype=np.int64)
    np.add.at(used, found.assignment.bin_of(), problem.sizes)
    return {
        name: {"cap": int(cap), "used": column.tolist()}
        for name, cap, column in zip(problem.cap_names, problem.caps, used.T, strict=True)
    }
