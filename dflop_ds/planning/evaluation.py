"""Expected step of one layout: the drawn batches are scheduled, then the event simulator runs them."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.memory import StageMemory
from dflop_ds.planning import communication
from dflop_ds.planning.layout import Layout
from dflop_ds.planning.memory import ModuleBins, stage_memories, total_bytes
from dflop_ds.planning.stages import StageTable
from dflop_ds.scheduling.assignment import Assignment
from dflop_ds.scheduling.blind import solve_blind
from dflop_ds.scheduling.lpt import solve_lpt
from dflop_ds.scheduling.ordering import order_bins
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.ramp import ramp_weights
from dflop_ds.simulation.step import StepResult, simulate_steps
from dflop_ds.simulation.work import ModuleWork, Network

IntArray = npt.NDArray[np.int64]

MAX_RAMP_MICROBATCHES = 32
"""Above it a ramp saves little and its search takes long."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """What is predicted of a layout.

    Attributes
    ----------
    layout : Layout
    sizes : tuple of int
        Layers of each stage; of a separate layout the encoder's stages come first.
    step_s : float
        Mean over the drawn batches of the simulated step, which ends with the slowest replica.
    steps_s : ndarray, shape (num_batches,)
    makespan_s : float
        Mean over the drawn batches of first forward to last backward.
    bubble_fraction : float
        Idle share of the makespan, over all GPUs.
    memory : tuple of StageMemory
        Peak of one GPU of every stage.
    max_tokens, max_encoder_inputs : int
        Largest microbatch that was scheduled.
    """

    layout: Layout
    sizes: tuple[int, ...]
    step_s: float
    steps_s: FloatArray
    makespan_s: float
    bubble_fraction: float
    memory: tuple[StageMemory, ...]
    max_tokens: int
    max_encoder_inputs: int

    @functools.cached_property
    def stage_bytes(self) -> FloatArray:
        """Bytes of every stage."""
        return total_bytes(list(self.memory))

    @property
    def busy_s(self) -> float:
        """Seconds that a GPU computes in a step, mean over the GPUs."""
        return (1.0 - self.bubble_fraction) * self.makespan_s

    @property
    def idle_s(self) -> float:
        """Seconds that a GPU waits between the first forward and the last backward, transfers included."""
        return self.bubble_fraction * self.makespan_s

    @property
    def end_s(self) -> float:
        """Seconds of the gradient reduction and the optimizer step."""
        return self.step_s - self.makespan_s

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest stage."""
        return float(self.stage_bytes.max())


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """Scheduled batches of a layout: which sample is in which bin."""

    bin_of: IntArray  # (num_batches, batch_size)
    features: MicrobatchFeatures  # of all bins of all batches
    forward_s: FloatArray  # (num_batches, llm replicas, microbatches, stages), whole bins
    backward_s: FloatArray


class Evaluator:
    """Simulated steps of layouts, data-aware or in data-blind order.

    Parameters
    ----------
    stages : StageTable
    blind : bool
        Put samples into bins by position, as stock DeepSpeed does.
    """

    def __init__(self, stages: StageTable, *, blind: bool = False) -> None:
        self.stages = stages
        self.workload = stages.workload
        self.blind = blind
        # Neither ZeRO stage nor memory changes the schedule.
        self._scheduled = functools.lru_cache(maxsize=64)(self._schedule)

    def evaluate(self, layout: Layout, sizes: tuple[int, ...] | None = None) -> Evaluation:
        """Predict the step of a layout.

        Parameters
        ----------
        layout : Layout
        sizes : tuple of int, optional
            Layers of each stage; by default balanced by time.
        """
        sizes = self.stages.layout_sizes(layout) if sizes is None else sizes
        run = self._scheduled(dataclasses.replace(layout, zero_stage=0), sizes)
        result = self._simulate(layout, sizes, run)
        bins = self._module_bins(layout, run)
        return Evaluation(
            layout=layout,
            sizes=sizes,
            step_s=float(result.step_time_s.mean()),
            steps_s=result.step_time_s,
            makespan_s=float(result.makespan_s.mean()),
            bubble_fraction=float(result.bubble_fraction.mean()),
            memory=tuple(stage_memories(self.workload, layout, sizes, bins)),
            max_tokens=int(run.features.llm_tokens.max()),
            max_encoder_inputs=int(run.features.encoder_inputs.max()),
        )

    def _schedule(self, layout: Layout, sizes: tuple[int, ...]) -> _Run:
        """Assign the samples of every drawn batch to bins and put the bins into order."""
        workload = self.workload
        data, count = layout.llm.data, layout.num_microbatches
        forward_s, backward_s = self._sample_costs_s(layout, sizes)
        weights, first = self._first_batch(layout, forward_s, backward_s)
        bin_of = np.empty((workload.num_batches, workload.batch_size), dtype=np.int64)
        bin_of[0] = first
        for batch in range(1, workload.num_batches):
            assignment = self._assign(layout, forward_s[batch], backward_s[batch], weights)
            bin_of[batch] = assignment.bin_of()
        num_bins = data * count
        flat = (bin_of + num_bins * np.arange(workload.num_batches)[:, None]).ravel()
        columns = []
        for field in dataclasses.fields(MicrobatchFeatures):
            values = getattr(workload.features, field.name)
            columns.append(_binned(flat, values[:, None], num_bins * workload.num_batches)[:, 0])
        shape = (workload.num_batches, data, count, -1)
        sums = [
            _binned(flat, times.reshape(-1, times.shape[-1]), num_bins * workload.num_batches).reshape(shape)
            for times in (forward_s, backward_s)
        ]
        return _Run(bin_of, MicrobatchFeatures(*columns), sums[0], sums[1])

    def _sample_costs_s(self, layout: Layout, sizes: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
        """Seconds of every sample in every stage, shape (num_batches, batch_size, num_stages).

        As if one replica of each module processed the whole sample; the encoder's stages come first.
        """
        counts = self.stages.count_between(np.cumsum([0, *sizes]))
        num_bins = layout.llm.data * layout.num_microbatches
        checkpointing = layout.activation_checkpointing
        parts = []
        if layout.encoder is None:
            parts.append((counts, layout.llm.tensor))
        else:
            cut = layout.encoder.pipeline
            parts += [(counts[:cut], layout.encoder.tensor), (counts[cut:], layout.llm.tensor)]
        forward_s, backward_s = [], []
        for held, tensor in parts:
            costs = self.workload.layer_costs(tensor, checkpointing, num_bins)
            forward_s.append(np.tensordot(costs.forward_s, held, axes=(0, 1)))
            backward_s.append(np.tensordot(costs.backward_s, held, axes=(0, 1)))
        return np.concatenate(forward_s, axis=2), np.concatenate(backward_s, axis=2)

    def _first_batch(
        self, layout: Layout, forward_s: FloatArray, backward_s: FloatArray
    ) -> tuple[tuple[float, ...], IntArray]:
        """Weights of the bins, a ramp where it shortens the first batch, and the bins of that batch."""
        count = layout.num_microbatches
        flat = (1.0,) * count
        weights = flat
        if not (self.blind or count > MAX_RAMP_MICROBATCHES or _group(layout) > 1):
            per_bin = layout.llm.data * count * self.workload.num_batches
            means = [times.sum(axis=(0, 1)) / per_bin * _speed(layout) for times in (forward_s, backward_s)]
            weights = ramp_weights(means[0].tolist(), means[1].tolist(), count)
        assigned = {
            tried: self._assign(layout, forward_s[0], backward_s[0], tried).bin_of()
            for tried in dict.fromkeys((flat, weights))
        }
        if len(assigned) == 1:
            return flat, assigned[flat]
        times_s = {
            tried: _makespan_s(layout, bins, forward_s[0], backward_s[0]) for tried, bins in assigned.items()
        }
        best = min(times_s, key=lambda tried: times_s[tried])
        return best, assigned[best]

    def _assign(
        self, layout: Layout, forward_s: FloatArray, backward_s: FloatArray, weights: tuple[float, ...]
    ) -> Assignment:
        data, count, group = layout.llm.data, layout.num_microbatches, _group(layout)
        total_s = (forward_s + backward_s) * _speed(layout)
        problem = Problem(
            _module_costs_s(total_s, layout),
            data,
            count,
            bin_weights=np.tile(weights, data) if len(set(weights)) > 1 else np.zeros(0),
            grouped_modules=(0,) if group > 1 else (),
            replicas_per_group=group,
        )
        if self.blind:
            return solve_blind(problem)
        assignment = solve_lpt(problem)
        if group > 1:
            return assignment
        return order_bins(
            assignment,
            forward_s=forward_s * _speed(layout),
            backward_s=backward_s * _speed(layout),
            num_replicas=data,
            num_microbatches=count,
            max_rounds=0,
        )

    def _simulate(self, layout: Layout, sizes: tuple[int, ...], run: _Run) -> StepResult:
        workload, hardware = self.workload, self.workload.hardware
        output_bytes = self._output_bytes(layout, sizes, run)
        works = []
        cut = layout.encoder.pipeline if layout.encoder else 0
        for part, degrees in ((slice(0, cut), layout.encoder), (slice(cut, None), layout.llm)):
            if degrees is None:
                continue
            arrays = [
                np.swapaxes(_to_replicas(values[..., part], degrees.data), 2, 3)
                for values in (run.forward_s, run.backward_s, output_bytes)
            ]
            works.append(ModuleWork(arrays[0], arrays[1], output_bytes=arrays[2]))
        num_trained = self.stages.count_between(np.cumsum([0, *sizes])) @ self.stages.trained
        links = communication.stage_links(hardware, layout)
        return simulate_steps(
            works,
            network=Network(links, "rendezvous"),
            end=communication.step_end(hardware, layout, num_trained, workload.model.value_bytes),
        )

    def _output_bytes(self, layout: Layout, sizes: tuple[int, ...], run: _Run) -> FloatArray:
        """Bytes that every stage hands on, shape of the times of `run`; the last stage hands on nothing."""
        model = self.workload.model
        result = np.zeros_like(run.forward_s)
        for stage, edge in enumerate(itertools.accumulate(sizes[:-1])):
            sent = model.memory.input_bytes(model.layers[edge], run.features, model.value_bytes)
            result[..., stage] = sent.reshape(result.shape[:3])
        return result

    def _module_bins(self, layout: Layout, run: _Run) -> ModuleBins:
        if layout.encoder is None or layout.encoder.data == layout.llm.data:
            return ModuleBins(run.features, run.features)
        shape = (self.workload.num_batches, layout.llm.data, layout.num_microbatches)
        columns = [
            _to_replicas(getattr(run.features, field.name).reshape(shape), layout.encoder.data).ravel()
            for field in dataclasses.fields(MicrobatchFeatures)
        ]
        return ModuleBins(MicrobatchFeatures(*columns), run.features)


def _binned(bin_of: IntArray, values: FloatArray, num_bins: int) -> FloatArray:
    """Sums of the columns of `values`, shape (n, k), by bin, shape (num_bins, k)."""
    sums = [np.bincount(bin_of, column, num_bins).astype(np.float64) for column in values.T]
    return np.stack(sums, axis=-1)


def _to_replicas(values: FloatArray, num_replicas: int) -> FloatArray:
    """Bins of the LLM's replicas, axis 1, as the parts that another module's replicas get.

    With fewer replicas each takes the bins of several together, with more each takes an equal part of one.
    """
    bins = values.shape[1]
    if num_replicas >= bins:
        ratio = num_replicas // bins
        return np.repeat(values / ratio, ratio, axis=1)
    grouped = values.reshape(values.shape[0], num_replicas, bins // num_replicas, *values.shape[2:])
    result: FloatArray = grouped.sum(axis=2)
    return result


def _group(layout: Layout) -> int:
    """Replicas of the LLM that share one replica of the encoder."""
    return 1 if layout.encoder is None else max(1, layout.llm.data // layout.encoder.data)


def _speed(layout: Layout) -> FloatArray:
    """Factor of each stage: an encoder with k replicas for one of the LLM takes 1 / k of the time."""
    factor = np.ones(layout.num_stages)
    if layout.encoder is not None:
        factor[: layout.encoder.pipeline] = min(1.0, layout.llm.data / layout.encoder.data)
    return factor


def _module_costs_s(total_s: FloatArray, layout: Layout) -> FloatArray:
    """Costs of the samples in the slowest stage, and in the one that differs most from it."""
    if layout.encoder is not None:
        cut = layout.encoder.pipeline
        first = int(total_s[:, :cut].sum(axis=0).argmax())
        return total_s[:, [first, cut + int(total_s[:, cut:].sum(axis=0).argmax())]]
    sums_s = total_s.sum(axis=0)
    slowest = int(sums_s.argmax())
    shares = total_s / np.maximum(sums_s, 1e-300)
    distance = np.abs(shares - shares[:, [slowest]]).sum(axis=0) * sums_s
    other = int(distance.argmax())
    return total_s[:, [slowest] if distance[other] == 0.0 else [slowest, other]]


def _makespan_s(layout: Layout, bin_of: IntArray, forward_s: FloatArray, backward_s: FloatArray) -> float:
    """Slowest replica of one batch, transfers left out."""
    num_bins = layout.llm.data * layout.num_microbatches
    arrays = []
    for times in (forward_s * _speed(layout), backward_s * _speed(layout)):
        sums = _binned(bin_of, times, num_bins)
        arrays.append(np.swapaxes(sums.reshape(layout.llm.data, layout.num_microbatches, -1), 1, 2)[None])
    return float(simulate_steps(ModuleWork(arrays[0], arrays[1])).makespan_s[0])
