"""What a training configuration would do, step by step: the plans that training makes, simulated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from dflop_ds.config import BatchSizes, DflopConfig
from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.cost.memory import TrainingSetting
from dflop_ds.cost.model import CostModel, SampleCosts
from dflop_ds.errors import PlanError
from dflop_ds.planning.model import ModelCosts
from dflop_ds.scheduling.plan_log import LoggedStep
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.shapes import ShapeTable
from dflop_ds.simulation.step import StepResult, simulate_steps
from dflop_ds.simulation.work import ModuleWork, Network, StepEnd

Bins = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedStep:
    """One optimizer step.

    Attributes
    ----------
    number : int
        Counted from 0, as in the plan log.
    bins : sequence of sequences of int
        Rows of the shape table; bin ``replica * num_microbatches + microbatch``.
    result : StepResult
        With one case.
    blind_s : float or None
        Simulated step of the data-blind order, if the limits allow it.
    """

    number: int
    bins: Bins
    result: StepResult
    blind_s: float | None

    @property
    def step_time_s(self) -> float:
        """Simulated seconds of the step."""
        return float(self.result.step_time_s[0])


class WhatIf:
    """Simulates the steps of a configuration.

    Parameters
    ----------
    config : DflopConfig
    sizes : BatchSizes
    num_replicas : int
    boundaries : sequence of int
        First layer of every stage, and the number of layers.
    table : ShapeTable
        The training data.
    model : ModelCosts
    setting : TrainingSetting
    network : Network
    end : StepEnd
    """

    def __init__(
        self,
        config: DflopConfig,
        sizes: BatchSizes,
        num_replicas: int,
        *,
        boundaries: Sequence[int],
        table: ShapeTable,
        model: ModelCosts,
        setting: TrainingSetting,
        network: Network,
        end: StepEnd,
    ) -> None:
        self.num_replicas = num_replicas
        self.table, self.model, self.setting = table, model, setting
        self.network, self.end = network, end
        self.stages = [model.layers[start:stop] for start, stop in itertools.pairwise(boundaries)]
        self._training: list[tuple[LayerTraining, ...]] | None = None
        if model.training is not None:
            self._training = [model.training[start:stop] for start, stop in itertools.pairwise(boundaries)]
        self.costs = CostModel(model.times, self.stages, self._training, model.profiled_checkpointing)
        self.sizes = sizes
        self._config = config

    @functools.cached_property
    def sample_costs(self) -> SampleCosts:
        """What each sample adds to each stage."""
        return self.costs.sample_costs(self.table, samples_per_bin=self.sizes.micro_batch_size)

    @functools.cached_property
    def planner(self) -> StepPlanner:
        """The planner that training would have."""
        return StepPlanner.from_config(
            self._config,
            self.sizes,
            table=self.table,
            rows=np.arange(len(self.table), dtype=np.int64),
            num_replicas=self.num_replicas,
            costs=self.sample_costs,
        )

    def step(self, number: int) -> SimulatedStep:
        """Plan a step as training would, and simulate it beside the data-blind order."""
        bins = self.planner.plan(number).plan.bins
        blind = dataclasses.replace(self.planner, policy="blind", max_tokens=None, max_encoder_inputs=None)
        blind_s = float(self.simulate(blind.plan(number).plan.bins).step_time_s[0])
        return SimulatedStep(number, bins, self.simulate(bins), blind_s)

    def logged(self, step: LoggedStep) -> SimulatedStep:
        """Simulate a step of a plan log.

        Raises
        ------
        PlanError
            If the log names a sample that the shape table lacks.
        """
        missing = [name for names in step.line["sample_ids"] for name in names if name not in self._rows]
        if missing:
            raise PlanError(
                f"the shape table must hold every sample of the plan log, {missing[0]!r} is missing. "
                "Use the shapes of the data that was trained on."
            )
        bins = [[self._rows[name] for name in names] for names in step.line["sample_ids"]]
        return SimulatedStep(step.plan.step, bins, self.simulate(bins), None)

    def simulate(self, bins: Bins) -> StepResult:
        """Simulate one step from its bins."""
        features = MicrobatchFeatures.from_bins(self.table, bins)
        forward_s, backward_s = (self._by_replica(each) for each in self.costs.stage_times(features))
        again = int(self.setting.activation_checkpointing) - int(self.model.profiled_checkpointing)
        if again:  # a stage without backward passes recomputes nothing
            backward_s = np.where(backward_s > 0, np.maximum(backward_s + again * forward_s, 0.0), 0.0)
        work = ModuleWork(forward_s, backward_s, self._by_replica(self._sent_bytes(features)))
        return simulate_steps(work, network=self.network, end=self.end)

    def memory_bytes(self, bins: Bins) -> FloatArray:
        """Peak bytes of every stage on its fullest replica, weights and optimizer included.

        Shape (num_stages,).
        """
        memory, count = self.model.memory, len(bins) // self.num_replicas
        replicas = [
            MicrobatchFeatures.from_bins(self.table, bins[start : start + count])
            for start in range(0, len(bins), count)
        ]
        training: Sequence[tuple[LayerTraining, ...] | None] = self._training or [None for _ in self.stages]
        total_bytes = [
            [
                memory.stage(self.stages, index, features, self.setting, states).total_bytes
                for index, states in enumerate(training)
            ]
            for features in replicas
        ]
        most: FloatArray = np.max(total_bytes, axis=0)
        return most

    def heaviest_sample(self, members: Sequence[int]) -> str:
        """Id of the sample that costs most in a bin; empty for an empty bin."""
        if not members:
            return ""
        rows = np.asarray(members)
        cost_s = (self.sample_costs.forward_s + self.sample_costs.backward_s)[rows].sum(axis=1)
        return self.table.sample_ids[int(rows[cost_s.argmax()])]

    @functools.cached_property
    def _rows(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.table.sample_ids)}

    def _by_replica(self, values: FloatArray) -> FloatArray:
        """(bins, stages) -> (1, replicas, stages, microbatches)."""
        by_bin = values.reshape(1, self.num_replicas, -1, values.shape[1])
        return np.ascontiguousarray(np.swapaxes(by_bin, 2, 3))

    def _sent_bytes(self, features: MicrobatchFeatures) -> FloatArray:
        """Bytes that enter the next stage; none leave the last one."""
        size = self.model.value_bytes
        entering = [self.model.memory.input_bytes(stage[0], features, size) for stage in self.stages[1:]]
        return np.stack([*entering, np.zeros(len(features))], axis=1)
