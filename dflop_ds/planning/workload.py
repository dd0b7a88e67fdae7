"""What is to be trained, on what: the user's samples drawn as global batches, and what they cost per layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.memory import MemoryModel, TrainingSetting, gradient_bytes, optimizer_bytes
from dflop_ds.cost.prior import OVERHEAD
from dflop_ds.errors import ConfigError
from dflop_ds.planning.communication import ring_s
from dflop_ds.planning.hardware import Hardware
from dflop_ds.shapes import ShapeTable

IntArray = npt.NDArray[np.int64]

TENSOR_REDUCTIONS = 2
"""All-reduces of a tensor-parallel block per direction (Shoeybi et al. 2019, arXiv 1909.08053, section 3)."""

_REDUCED_KINDS = ("vision_block", "decoder_block")


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
    layers : sequence of str
        Kind of every layer, in pipeline order.
    table : ShapeTable
        The user's samples.
    batch_size : int
        Samples of one optimizer step over all replicas.
    layer_model : LayerCostModel
    memory_model : MemoryModel
    hardware : Hardware
    value_bytes : int
        2 for bf16, 4 for fp32.
    checkpointed_profile : bool
        Whether the backward times of `layer_model` include a second forward.
    measured : bool
        Whether `layer_model` was fitted to measurements.
    num_batches : int
        Global batches that are drawn.
    seed : int

    Raises
    ------
    ConfigError
        If there is no sample, or a count is not positive.
    """

    def __init__(
        self,
        layers: Sequence[str],
        table: ShapeTable,
        batch_size: int,
        *,
        layer_model: LayerCostModel,
        memory_model: MemoryModel,
        hardware: Hardware,
        value_bytes: int = 2,
        checkpointed_profile: bool = False,
        measured: bool = True,
        num_batches: int = 4,
        seed: int = 0,
    ) -> None:
        if not len(table) or batch_size < 1 or num_batches < 1:
            raise ConfigError(
                f"planning needs samples, a batch size and batches of at least 1, found {len(table)} samples, "
                f"batch_size {batch_size} and num_batches {num_batches}. Correct them."
            )
        self.layers = tuple(layers)
        self.kinds = tuple(dict.fromkeys(layers))
        self.table = table
        self.batch_size = batch_size
        self.layer_model = layer_model
        self.memory_model = memory_model
        self.hardware = hardware
        self.value_bytes = value_bytes
        self.checkpointed_profile = checkpointed_profile
        self.measured = measured
        rng = np.random.default_rng(seed)
        # A batch holds every sample once; only a data set smaller than a batch repeats samples.
        self.rows: IntArray = np.stack(
            [
                rng.choice(len(table), batch_size, replace=batch_size > len(table))
                for _ in range(num_batches)
            ]
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

    def state_bytes_per_parameter(self, data: IntArray, zero_stage: IntArray) -> FloatArray:
        """Bytes of weight, gradient and optimizer state of a parameter, as the memory model counts them."""
        per_parameter = {}
        pairs = sorted({*zip(data.tolist(), zero_stage.tolist(), strict=True)})
        for replicas, stage in pairs:
            setting = TrainingSetting(self.value_bytes, replicas, stage)
            per_parameter[replicas, stage] = (
                self.value_bytes + gradient_bytes(setting) + optimizer_bytes(setting)
            )
        return np.array([per_parameter[pair] for pair in zip(data.tolist(), zero_stage.tolist(), strict=True)])

    def batch(self, index: int) -> ShapeTable:
        """Shapes of one drawn global batch."""
        return self.table.take(self.rows[index])

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a workload lives as long as the search that holds it
    def layer_costs(self, tensor: int, checkpointing: bool, num_bins: int) -> LayerCosts:
        """Costs of one layer of each kind under a tensor-parallel degree.

        Work divides by the tensor-parallel degree, launch overhead does not; blocks reduce their activations
        over the group. A sample is charged the share of the overhead that remains when `num_bins` bins
        share the batch. Checkpointing adds a second forward to the backward pass.
        """
        shape = (len(self.kinds), self.num_batches, self.batch_size)
        forward_s, backward_s = np.empty(shape), np.empty(shape)
        for index, kind in enumerate(self.kinds):
            work_s, overhead_s, works = self._work(kind)
            sharing = self._sharing(works, self.batch_size / num_bins)
            sent = self.memory_model.input_bytes(kind, self.features, self.value_bytes) / (
                self.hardware.intra_node_bytes_per_s
            )
            passes = []
            for direction in (0, 1):
                time_s = work_s[direction] / tensor
                fixed_s = overhead_s[direction]
                if tensor > 1 and kind in _REDUCED_KINDS:
                    time_s = time_s + TENSOR_REDUCTIONS * 2.0 * (tensor - 1) / tensor * sent
                    fixed_s += TENSOR_REDUCTIONS * float(ring_s(self.hardware, tensor, 0.0, False))
                passes.append(np.where(works, time_s + fixed_s / sharing, 0.0))
            if checkpointing != self.checkpointed_profile:
                again = passes[0] if checkpointing else -passes[0]
                passes[1] = np.maximum(passes[1] + again, 0.0)
            forward_s[index] = passes[0].reshape(shape[1:])
            backward_s[index] = passes[1].reshape(shape[1:])
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
            sums = self._sums(kind)
            sharing = np.array([sums.sharing(self.batch_size / bins) for bins in num_bins])
            reduced = kind in _REDUCED_KINDS
            sent_s = np.where(reduced & (tensor > 1), TENSOR_REDUCTIONS * 2.0 * (tensor - 1) / tensor, 0.0)
            start_s = TENSOR_REDUCTIONS * ring_s(self.hardware, tensor, 0.0, False) if reduced else 0.0
            passes = [
                sums.work_s[direction] / tensor
                + sent_s * sums.sent_s
                + sums.num_working * (sums.overhead_s[direction] + start_s) / sharing
                for direction in (0, 1)
            ]
            if checkpointing != self.checkpointed_profile:
                again = passes[0] if checkpointing else -passes[0]
                passes[1] = np.maximum(passes[1] + again, 0.0)
            totals[:, index] = passes[0] + passes[1]
        return totals

    @functools.lru_cache(maxsize=32)  # noqa: B019 - as above
    def _sums(self, kind: str) -> _Sums:
        work_s, overhead_s, works = self._work(kind)
        sent = self.memory_model.input_bytes(kind, self.features, self.value_bytes)
        return _Sums(
            (float(work_s[0].sum()) / self.num_batches, float(work_s[1].sum()) / self.num_batches),
            overhead_s,
            float(sent.sum()) / self.hardware.intra_node_bytes_per_s / self.num_batches,
            float(works.sum()) / self.num_batches,
            float(works.mean()),
        )

    @functools.lru_cache(maxsize=32)  # noqa: B019 - as above
    def _work(self, kind: str) -> tuple[FloatArray, tuple[float, float], npt.NDArray[np.bool_]]:
        """Seconds without launch overhead, shape (2, n), overhead of both directions, samples with work."""
        overhead_s = tuple(
            self.layer_model.priors_[kind, direction].coefficients_[OVERHEAD]
            for direction in ("forward", "backward")
        )
        works = self.features.work_mask(kind)
        spread = max(1.0, self.batch_size**0.5)
        times_s = self.layer_model.predict_marginal(kind, self.features, spread)
        share = self._sharing(works, spread)
        work_s = np.stack(
            [np.maximum(time_s - fixed_s / share, 0.0) for time_s, fixed_s in zip(times_s, overhead_s, strict=True)]
        )
        return work_s, (overhead_s[0], overhead_s[1]), works

    @staticmethod
    def _sharing(works: npt.NDArray[np.bool_], samples_per_bin: float) -> float:
        return _sharing(float(works.mean()), samples_per_bin)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Of one layer of a kind over a batch: seconds of work, of overhead per launch, of sending its input."""

    work_s: tuple[float, float]
    overhead_s: tuple[float, float]
    sent_s: float
    num_working: float
    share: float

    def sharing(self, samples_per_bin: float) -> float:
        return _sharing(self.share, samples_per_bin)


def _sharing(share: float, samples_per_bin: float) -> float:
    """Samples with work in a bin that has any, the rule of `LayerCostModel.predict_marginal`."""
    if share == 0.0:
        return 1.0
    samples_per_bin = max(1.0, samples_per_bin)
    return max(1.0, samples_per_bin * share / (1.0 - (1.0 - share) ** samples_per_bin))
