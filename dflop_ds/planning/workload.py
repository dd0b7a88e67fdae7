"""What is to be trained, on what: the user's samples as global batches, and what they cost per layer."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.gradients import backward_factor
from dflop_ds.cost.memory import TrainingSetting, gradient_bytes, optimizer_bytes
from dflop_ds.cost.prior import DIRECTIONS, OVERHEAD
from dflop_ds.errors import ConfigError
from dflop_ds.planning.communication import tensor_reduction_s
from dflop_ds.planning.hardware import Hardware
from dflop_ds.planning.model import ModelCosts
from dflop_ds.shapes import ShapeTable

IntArray = npt.NDArray[np.int64]

TENSOR_REDUCTIONS = 2
"""All-reduces of a tensor-parallel block per direction (Shoeybi et al. 2019, arXiv 1909.08053, section 3)."""

_DRAWN_SAMPLES = 4096
_REDUCED_KINDS = ("vision_block", "vision_window_block", "vision_frame_block", "decoder_block")


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """Seconds that every sample of the drawn batches adds to one layer of each kind.

    Attributes
    ----------
    kinds : tuple of str
    forward_s, backward_s : ndarray, shape (num_kinds, num_batches, batch_size)
    """

    kinds: tuple[str, ...]
    forward_s: FloatArray
    backward_s: FloatArray


class Workload:
    """Model, data and cluster of one planning problem.

    Parameters
    ----------
    model : ModelCosts
    table : ShapeTable
        The user's samples.
    batch_size : int
        Samples of one optimizer step over all replicas.
    hardware : Hardware
    num_batches : int
        Global batches that are drawn; 0: about 4,096 samples in all, in 2 to 8 batches.
    seed : int

    Raises
    ------
    ConfigError
        If there is no sample, or a count is not positive.
    """

    def __init__(
        self,
        model: ModelCosts,
        table: ShapeTable,
        batch_size: int,
        *,
        hardware: Hardware,
        num_batches: int = 0,
        seed: int = 0,
    ) -> None:
        if not len(table) or batch_size < 1 or num_batches < 0:
            raise ConfigError(
                f"planning needs samples and a batch size of at least 1, found {len(table)} samples, "
                f"batch_size {batch_size} and num_batches {num_batches}. Correct them."
            )
        self.model, self.table, self.batch_size, self.hardware = model, table, batch_size, hardware
        self.layers, self.kinds = model.layers, model.kinds
        self.training = model.training_by_kind()
        self._seed = seed
        rng = np.random.default_rng(seed)
        num_batches = num_batches or min(8, max(2, _DRAWN_SAMPLES // batch_size))
        # A batch holds every sample once; only a data set smaller than a batch repeats samples.
        self.rows: IntArray = np.stack(
            [rng.choice(len(table), batch_size, replace=batch_size > len(table)) for _ in range(num_batches)]
        )
        self.drawn = table.take(self.rows.ravel())
        self.features = MicrobatchFeatures.from_shapes(self.drawn)
        self.tokens_per_step = float(self.drawn.llm_tokens.sum()) / num_batches

    @property
    def num_batches(self) -> int:
        """Global batches that were drawn."""
        return len(self.rows)

    @property
    def encoder_layers(self) -> int:
        """Layers before the LLM: encoder and projector."""
        return self.layers.index("token_embed")

    def with_rows(self, rows: IntArray) -> Workload:
        """The same problem with some of the samples only."""
        return Workload(
            self.model,
            self.table.take(rows),
            self.batch_size,
            hardware=self.hardware,
            num_batches=self.num_batches,
            seed=self._seed,
        )

    def state_bytes_per_parameter(self, data: IntArray, zero_stage: IntArray) -> FloatArray:
        """Bytes of gradient and optimizer state of a trained parameter, as the memory model counts them."""
        pairs, inverse = np.unique(2 * data + zero_stage, return_inverse=True)
        settings = [TrainingSetting(self.model.value_bytes, pair // 2, pair % 2) for pair in pairs.tolist()]
        each = [gradient_bytes(one) + optimizer_bytes(one) for one in settings]
        return np.array(each, dtype=np.float64)[inverse]

    def kept_bytes(self, checkpointing: bool) -> FloatArray:
        """Bytes that one layer of each kind keeps of a whole batch, shape (num_kinds,).

        Mean over the batches, of the batch taken as one microbatch: no bins keep less in their sum.
        """
        memory, whole = self.model.memory, self._mean_batch
        scale = self.model.value_bytes / memory.value_bytes

        def kept(kind: str) -> float:
            if not self.training[kind].has_backward:
                return 0.0
            if checkpointing:
                return float(memory.input_bytes(kind, whole, self.model.value_bytes)[0])
            return float(memory.activation_bytes(kind, whole)[0] * scale)

        return np.array([kept(kind) for kind in self.kinds])

    @functools.cached_property
    def logits_bytes(self) -> float:
        """Bytes of the logits of a whole batch with all their copies, mean over the batches."""
        setting = TrainingSetting(self.model.value_bytes)
        return self.model.memory.stage([["head"]], 0, self._mean_batch, setting).logits_bytes

    @functools.cached_property
    def _mean_batch(self) -> MicrobatchFeatures:
        fields = dataclasses.fields(MicrobatchFeatures)
        return MicrobatchFeatures(
            *(np.array([getattr(self.features, field.name).sum() / self.num_batches]) for field in fields)
        )

    def batch(self, index: int) -> ShapeTable:
        """Shapes of one drawn global batch."""
        return self.table.take(self.rows[index])

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a workload lives as long as the search that holds it
    def layer_costs(self, tensor: int, checkpointing: bool, num_bins: int) -> LayerCosts:
        """Costs of one layer of each kind under a tensor-parallel degree.

        A measured degree is taken as it is. Otherwise work divides by the degree, launch overhead does not,
        and blocks reduce their activations over the group. A sample is charged the share of the overhead
        that remains when `num_bins` bins share the batch. Checkpointing adds a second forward to backward.
        """
        shape = (len(self.kinds), self.num_batches, self.batch_size)
        forward_s, backward_s = np.empty(shape), np.empty(shape)
        for index, kind in enumerate(self.kinds):
            work = self._work(kind, tensor)
            sharing = _sharing(work.share, self.batch_size / num_bins)
            passes = [
                np.where(work.works, work.work_s[direction] + work.overhead_s[direction] / sharing, 0.0)
                for direction in (0, 1)
            ]
            forward_s[index] = passes[0].reshape(shape[1:])
            backward_s[index] = self._backward_s(kind, passes[0], passes[1], checkpointing).reshape(shape[1:])
        return LayerCosts(self.kinds, forward_s, backward_s)

    def layer_totals(self, tensor: IntArray, checkpointing: bool, num_bins: IntArray) -> FloatArray:
        """Forward plus backward seconds of a whole batch in one layer of each kind, mean over the batches.

        Parameters
        ----------
        tensor, num_bins : ndarray, shape (n,)

        Returns
        -------
        ndarray, shape (n, num_kinds)
        """
        totals = np.empty((len(tensor), len(self.kinds)))
        for index, kind in enumerate(self.kinds):
            works = [self._work(kind, degree) for degree in tensor.tolist()]
            passes = np.array(
                [
                    work.total_s(self.batch_size / bins)
                    for work, bins in zip(works, num_bins.tolist(), strict=True)
                ]
            )
            passes /= self.num_batches
            forward_s, backward_s = passes.T
            totals[:, index] = forward_s + self._backward_s(kind, forward_s, backward_s, checkpointing)
        return totals

    def _backward_s(
        self, kind: str, forward_s: FloatArray, backward_s: FloatArray, checkpointing: bool
    ) -> FloatArray:
        """Backward times of what is trained, with or without a second forward, whichever the profile has."""
        if checkpointing != self.model.profiled_checkpointing:
            backward_s = np.maximum(backward_s + (forward_s if checkpointing else -forward_s), 0.0)
        state, dims = self.training[kind], self.model.memory.dims
        return backward_s * float(backward_factor(kind, self._mean_batch, dims, state, checkpointing)[0])

    @functools.lru_cache(maxsize=256)  # noqa: B019 - as above
    def _work(self, kind: str, tensor: int) -> _Work:
        """What one layer of a kind costs the samples on each of `tensor` ranks."""
        measured = self.model.tensor_times.get(tensor)
        times = self.model.times if measured is None else measured
        overhead_s = np.array([times.priors_[kind, name].coefficients_[OVERHEAD] for name in DIRECTIONS])
        works = self.features.work_mask(kind)
        spread = max(1.0, self.batch_size**0.5)
        times_s = np.stack(times.predict_marginal(kind, self.features, spread))
        work_s = np.maximum(times_s - (overhead_s / _sharing(float(works.mean()), spread))[:, None], 0.0)
        if measured is None and tensor > 1:
            work_s = work_s / tensor
            if kind in _REDUCED_KINDS:
                latency_s = float(tensor_reduction_s(self.hardware, tensor, 0.0))
                size = self.model.memory.input_bytes(kind, self.features, self.model.value_bytes)
                reduction_s = tensor_reduction_s(self.hardware, tensor, size) - latency_s
                work_s = work_s + TENSOR_REDUCTIONS * reduction_s
                overhead_s = overhead_s + TENSOR_REDUCTIONS * (self.hardware.collective_latency_s + latency_s)
        return _Work(work_s, overhead_s, works)


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    """One layer of a kind: seconds of work, shape (2, n), and of overhead, shape (2,), samples with work."""

    work_s: FloatArray
    overhead_s: FloatArray
    works: npt.NDArray[np.bool_]

    @functools.cached_property
    def share(self) -> float:
        """Share of the samples that have work."""
        return float(self.works.mean())

    @functools.cached_property
    def _work_sum_s(self) -> FloatArray:
        sums: FloatArray = np.where(self.works, self.work_s, 0.0).sum(axis=1)
        return sums

    def total_s(self, samples_per_bin: float) -> FloatArray:
        """Seconds of all samples in both directions, shape (2,)."""
        num_working = float(self.works.sum())
        return self._work_sum_s + num_working * self.overhead_s / _sharing(self.share, samples_per_bin)


def _sharing(share: float, samples_per_bin: float) -> float:
    """Samples with work in a bin that has any, the rule of `LayerCostModel.predict_marginal`."""
    if share == 0.0:
        return 1.0
    samples_per_bin = max(1.0, samples_per_bin)
    working = 1.0 - float((1.0 - share) ** samples_per_bin)
    return max(1.0, samples_per_bin * share / working)
