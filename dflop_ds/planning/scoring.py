"""An estimate and a bound of the step time of every candidate, by a few array operations on all at once.

- The *bound* is what no schedule of the layout can beat: the work of the slowest stage divided by its
  replicas, plus the reduction of the gradients and the optimizer step, which follow every step.
- The *estimate* adds what is lost: filling and draining the pipeline, transfers, and the unevenness of bins,
  taken from the drawn batches dealt into as many bins as the layout has. It is the mean over the batches of
  the largest replica, not the largest of means.

Stages are looked up in tables over depth, tensor degree, checkpointing and number of bins, so that the work
per candidate is a handful of look-ups.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray
from dflop_ds.planning import communication
from dflop_ds.planning.candidates import NO_ENCODER, Candidates
from dflop_ds.planning.memory import inner_share
from dflop_ds.planning.stages import StageTable

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of every candidate, arrays of shape (n,).

    Attributes
    ----------
    estimate_s, bound_s : ndarray of float64
    least_bytes : ndarray of float64
        No less than the fullest stage needs: weights with their state, and mean microbatches in flight.
    expected_bytes : ndarray of float64
        The same with the largest microbatches of the dealt batches.
    """

    estimate_s: FloatArray
    bound_s: FloatArray
    least_bytes: FloatArray
    expected_bytes: FloatArray


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Of the encoder, the LLM or the whole model: seconds per replica and step, bytes per GPU."""

    slowest_s: FloatArray
    all_s: FloatArray
    update_s: FloatArray
    least_bytes: FloatArray
    expected_bytes: FloatArray


class Scorer:
    """Estimates and bounds of candidates.

    Parameters
    ----------
    stages : StageTable
    """

    def __init__(self, stages: StageTable) -> None:
        self.stages = stages
        self.workload = stages.workload

    def scores(self, candidates: Candidates) -> Scores:
        """Score all candidates."""
        uniform = candidates.encoder[:, 0] == NO_ENCODER
        size = len(candidates)
        encoder = _Columns(*np.zeros((5, size)))
        llm = _Columns(*np.zeros((5, size)))
        coupled, joint, largest = self._unevenness(candidates)
        for name, rows, degrees, columns in (
            ("all", uniform, candidates.llm, llm),
            ("llm", ~uniform, candidates.llm, llm),
            ("encoder", ~uniform, candidates.encoder, encoder),
        ):
            if rows.any():
                self._fill(columns, name, np.flatnonzero(rows), degrees[rows], candidates, largest)
        bottleneck_s = np.maximum(encoder.slowest_s, llm.slowest_s)
        update_s = np.maximum(encoder.update_s, llm.update_s)
        fill_s = (encoder.all_s + llm.all_s - bottleneck_s) / candidates.num_microbatches
        depth = candidates.llm[:, 1] + candidates.encoder[:, 1]
        # A single stage adds its layers up; several stages wait for the slower module of every microbatch.
        slowest = np.where(depth == 1, joint, coupled)
        moved_s = 2.0 * (depth - 1) * self._send_s(candidates)
        return Scores(
            estimate_s=bottleneck_s * slowest + fill_s + moved_s + update_s,
            bound_s=bottleneck_s + update_s,
            least_bytes=np.maximum(encoder.least_bytes, llm.least_bytes),
            expected_bytes=np.maximum(encoder.expected_bytes, llm.expected_bytes),
        )

    def _fill(
        self,
        columns: _Columns,
        name: str,
        rows: IntArray,
        degrees: IntArray,
        candidates: Candidates,
        uneven: FloatArray,
    ) -> None:
        """Write the columns of one part of the model at the given rows."""
        tensor, depth, data = degrees.T
        checkpointing = candidates.checkpointing[rows]
        zero_stage = candidates.zero_stage[rows]
        bins = candidates.llm[rows, 2] * candidates.num_microbatches[rows]
        tensors, tensor_at = np.unique(tensor, return_inverse=True)
        counts, bins_at = np.unique(bins, return_inverse=True)
        depths, depth_at = np.unique(depth, return_inverse=True)
        grid = np.array([(t, b) for t in tensors for b in counts])
        slowest_s = np.empty((2, len(depths), len(grid)))
        all_s, weights, trained, kept = np.empty_like(slowest_s), *np.empty((3, 2, len(depths), 3))
        stepped = np.empty((2, len(depths)))
        for option in np.unique(checkpointing).astype(int):
            totals_s = self.workload.layer_totals(grid[:, 0], bool(option), grid[:, 1])
            kept_bytes = self.workload.kept_bytes(bool(option))
            for index, stages in enumerate(depths.tolist()):
                held = self.stages.counts(name, stages, bool(option))
                stage_s = held @ totals_s.T
                slowest_s[option, index], all_s[option, index] = stage_s.max(axis=0), stage_s.sum(axis=0)
                own = held @ self.stages.parameters
                picked = [0, int(own.argmax()), -1]
                weights[option, index] = own[picked]
                trained[option, index] = (held @ self.stages.trained)[picked]
                stepped[option, index] = (held @ self.stages.trained).max()
                kept[option, index] = (held @ kept_bytes)[[0, 0, -1]]
        option = checkpointing.astype(np.int64)
        at = (option, depth_at, tensor_at * len(counts) + bins_at)
        columns.slowest_s[rows] = slowest_s[at] / data
        columns.all_s[rows] = all_s[at] / data
        largest = stepped[at[:2]] / tensor
        parameters = np.stack([weights[at[:2]].T, trained[at[:2]].T]) / tensor
        hardware = self.workload.hardware
        columns.update_s[rows] = communication.reduce_s(
            hardware, tensor, data, largest * self.workload.model.value_bytes
        ) + communication.optimizer_s(hardware, largest, data, zero_stage)
        for target, factor in ((columns.least_bytes, 1.0), (columns.expected_bytes, uneven[rows])):
            target[rows] = self._stage_bytes(
                name, rows, degrees, candidates, parameters, kept[at[:2]].T * factor
            )

    def _stage_bytes(
        self,
        name: str,
        rows: IntArray,
        degrees: IntArray,
        candidates: Candidates,
        weights: FloatArray,
        kept: FloatArray,
    ) -> FloatArray:
        """Bytes of the first, the heaviest and the last stage of a part, the largest of the three.

        `weights` are parameters of one GPU, all and the trained ones of each stage, shape (2, 3, n); `kept`
        are activations of a whole batch, shape (3, n).
        """
        tensor, depth, data = degrees.T
        count = candidates.num_microbatches[rows]
        behind = depth + (candidates.llm[rows, 1] if name == "encoder" else 0)
        inner = np.where(candidates.checkpointing[rows], 1.0, inner_share(tensor))
        microbatch = kept / (data * count) * inner
        zero_stage = candidates.zero_stage[rows]
        state = weights[0] * self.workload.model.value_bytes
        state = state + weights[1] * self.workload.state_bytes_per_parameter(data, zero_stage)
        # ZeRO-1 allocates its buffer whole.
        state = state + np.where(zero_stage == 1, 4.0 * self.workload.model.reduce_bucket_values, 0.0)
        first = state[0] + np.minimum(behind, count) * microbatch[0]
        last = state[2] + microbatch[2]
        if name != "encoder":
            last = last + self.workload.logits_bytes / (data * count) / tensor
        fullest: FloatArray = np.maximum(np.maximum(first, last), state[1])
        return fullest

    def _send_s(self, candidates: Candidates) -> FloatArray:
        bins = candidates.llm[:, 2] * candidates.num_microbatches
        gpus = candidates.llm.prod(axis=1) + candidates.encoder.prod(axis=1)
        intra, inter = communication.node_links(self.workload.hardware)
        far = gpus > self.workload.hardware.gpus_per_node
        latency_s = np.where(far, inter.latency_s, intra.latency_s)
        bandwidth = np.where(far, inter.bandwidth_bytes_per_s, intra.bandwidth_bytes_per_s)
        return latency_s + self.transfer_bytes / bins / bandwidth

    @functools.cached_property
    def transfer_bytes(self) -> float:
        """Bytes that a whole batch sends over one boundary between stages, mean over the layers."""
        workload = self.workload
        per_kind = {
            kind: float(
                workload.model.memory.input_bytes(kind, workload.features, workload.model.value_bytes).sum()
            )
            for kind in workload.kinds
        }
        num_boundaries = max(1, len(workload.layers) - 1)
        return sum(per_kind[kind] for kind in workload.layers[1:]) / num_boundaries / workload.num_batches

    def _unevenness(self, candidates: Candidates) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of the batches dealt into equal bins, each over its mean: see `_dealt`."""
        data, count = candidates.llm[:, 2], candidates.num_microbatches
        base = self.workload.batch_size + 1
        unique, inverse = np.unique(data * base + count, return_inverse=True)
        factors = np.array([self._dealt(*divmod(key, base)) for key in unique.tolist()])
        return factors[inverse, 0], factors[inverse, 1], factors[inverse, 2]

    def _dealt(self, data: int, count: int) -> tuple[float, float, float]:
        """Samples dealt in turn, back and forth, from the costliest down.

        Expected slowest replica if every bin counts as its heavier module and if modules add up, and the
        largest bin if they add up.
        """
        num_bins = data * count
        loads = []
        for module in (*self._descending_s, sum(self._descending_s)):
            rounds = np.asarray(module).reshape(self.workload.num_batches, -1, num_bins).copy()
            rounds[:, 1::2] = rounds[:, 1::2, ::-1]
            bins = rounds.sum(axis=1)
            loads.append(bins / np.maximum(bins.mean(axis=1, keepdims=True), 1e-300))
        shape = (self.workload.num_batches, data, count)
        coupled, joint = (
            each.reshape(shape).mean(axis=2).max(axis=1).mean()
            for each in (np.maximum(loads[0], loads[1]), loads[2])
        )
        return float(coupled), float(joint), float(loads[2].max(axis=1).mean())

    @functools.cached_property
    def _descending_s(self) -> tuple[FloatArray, FloatArray]:
        """Seconds of every sample in encoder and LLM, the costliest sample of a batch first."""
        workload = self.workload
        costs = workload.layer_costs(1, False, workload.batch_size)
        layers = np.array([workload.layers.count(kind) for kind in workload.kinds])
        cut = workload.kinds.index("token_embed")
        per_kind = (costs.forward_s + costs.backward_s) * layers[:, None, None]
        modules = per_kind[:cut].sum(axis=0), per_kind[cut:].sum(axis=0)
        order = np.argsort(-(modules[0] + modules[1]), axis=1)
        return np.take_along_axis(modules[0], order, axis=1), np.take_along_axis(modules[1], order, axis=1)
