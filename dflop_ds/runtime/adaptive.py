"""Corrects predicted costs while training runs: gathers stage times, learns, hands costs to the planner."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from dflop_ds.cost.correction import AdaptiveCorrection, StageSample
from dflop_ds.cost.model import SampleCosts
from dflop_ds.cost.shape_buckets import ShapeBuckets
from dflop_ds.errors import ConfigError
from dflop_ds.runtime import distributed
from dflop_ds.runtime.telemetry import StepRecord
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import PlannedStep, StepPlanner


class AdaptivePlanner:
    """A :class:`StepPlanner` whose costs follow the measurements.

    Every rank gathers the same measurements and so holds the same correction; rank 0 uses it for the
    steps that are not planned yet.

    Parameters
    ----------
    planner : StepPlanner
        With the costs of the cost model.
    stage, replica, num_stages : int
        Of this rank.
    """

    def __init__(self, planner: StepPlanner, stage: int, replica: int, num_stages: int) -> None:
        if planner.costs is None:
            raise ConfigError(
                f'dflop.cost.adaptive must be false with dflop.scheduler.policy "{planner.policy}", which '
                "uses no predicted times, found true. Choose another policy or turn it off."
            )
        self.planner = planner
        self.stage, self.replica = stage, replica
        self.buckets = ShapeBuckets(planner.table)
        self.correction = AdaptiveCorrection(num_stages, planner.num_replicas, ShapeBuckets.num_buckets)
        self._costs = planner.costs
        self._row_of = {int(index): row for row, index in enumerate(planner.rows)}
        self._live = planner
        self._last_cost_s = 0.0

    def plan(self, step: int) -> PlannedStep:
        """Plan of a step with the costs known now; called from the planning thread of rank 0."""
        return self._live.plan(step)

    def fallback(self, step: int) -> PlannedStep:
        """Plan of a step without the solver."""
        return self._live.fallback(step)

    def after_step(self, plan: StepPlan, record: StepRecord) -> None:
        """Gather the stage times of a step from all ranks and learn from them; a collective call.

        Parameters
        ----------
        plan : StepPlan
            The step that ran.
        record : StepRecord
            This rank's measurements.
        """
        if not self.correction.wants(plan.step):
            return
        start_s = time.perf_counter()
        rows = self._gather(record, plan.num_microbatches)
        samples = [sample for row in rows for sample in self._samples(row, plan)]
        # The slowest rank's cost of the last time: the same number on every rank.
        self.correction.observe(samples, max(row[2] for row in rows))
        self._publish()
        self._last_cost_s = time.perf_counter() - start_s

    def state_dict(self) -> dict[str, Any]:
        """State of the correction, for a checkpoint."""
        return self.correction.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's correction."""
        self.correction.load_state_dict(state)
        self._publish()

    def _gather(self, record: StepRecord, num_microbatches: int) -> list[list[float]]:
        """By rank: stage, replica, tracking cost and seconds of each microbatch."""
        seconds: collections.defaultdict[int, float] = collections.defaultdict(float)
        for passed in record.compute():
            seconds[passed.microbatch] += passed.duration_s
        own = [float(self.stage), float(self.replica), self._last_cost_s]
        own += [seconds[number] for number in range(num_microbatches)]
        device = distributed.device()
        mine = torch.tensor(own, dtype=torch.float32, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return [[float(value) for value in tensor.cpu()] for tensor in gathered]

    def _samples(self, row: list[float], plan: StepPlan) -> list[StageSample]:
        stage, replica = int(row[0]), int(row[1])
        costs_s = self._costs.forward_s + self._costs.backward_s
        samples = []
        for members, seconds in zip(plan.replica_bins(replica), row[3:], strict=True):
            split = self.buckets.split([self._row_of[int(index)] for index in members], costs_s)
            samples.append(StageSample(replica, stage, tuple(split[:, stage].tolist()), seconds))
        return samples

    def _publish(self) -> None:
        factors = self.correction.sample_factors(self.buckets)
        costs = SampleCosts(self._costs.forward_s * factors, self._costs.backward_s * factors)
        slowness = self.correction.replica_slowness()
        speeds = tuple((1.0 / slowness).tolist()) if np.ptp(slowness) > 0 else ()
        # One assignment: the planning thread sees the old planner or the new one.
        self._live = dataclasses.replace(self.planner, costs=costs, replica_speeds=speeds)
