"""Predicted bytes of a pipeline stage: weights and their state, activations in flight, buffers.

The rules, with their sources:

- Adam keeps two moments per parameter in fp32; mixed precision adds an fp32 copy of the weights, so
  16-bit training holds 2 + 2 + 12 bytes per parameter, of which ZeRO-1 divides the 12 over the
  data-parallel ranks (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1). DeepSpeed's bf16 pipeline
  optimizer keeps fp32 gradients beside the 16-bit ones.
- Under 1F1B stage s of p holds at most ``min(p - s, m)`` of m microbatches (Narayanan et al. 2021,
  arXiv 2104.04473, section 2.2).
- With checkpointing a layer keeps its input only; the layer that is recomputed holds the rest (Chen et
  al. 2016, arXiv 1604.06174).
- The layer that runs backward also holds gradients of its own activations, about half of what it kept
  (counted tensor by tensor for SigLIP and Qwen2 blocks: 0.3 to 0.5). Logits are gone by then, so that of
  both the larger one counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dflop_ds.cost.features import (
    ENCODER_KINDS,
    LAYER_KINDS,
    FloatArray,
    MicrobatchFeatures,
    ProfileRow,
    check_kind,
    check_rows,
)
from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.errors import CostModelError
from dflop_ds.flops import ModelDims

_MOMENTS = 2
_FP32_BYTES = 4
_BACKWARD_SHARE = 0.5
_FEWEST_BUFFERS = 2  # of DeepSpeed's PipelineEngine
_TERMS: dict[str, tuple[str, ...]] = {
    "vision_embed": ("encoder_inputs",),
    "vision_block": ("encoder_inputs",),
    "vision_window_block": ("encoder_inputs", "sum_squared_windows"),
    "vision_frame_block": ("encoder_inputs", "sum_squared_frames"),
    "projector": ("encoder_inputs", "media_tokens"),
    "token_embed": ("llm_tokens", "media_tokens"),
    "decoder_block": ("llm_tokens", "sum_squared_tokens", "num_segments"),
    "norm": ("llm_tokens", "target_tokens"),
    "head": ("target_tokens",),
}


@dataclasses.dataclass(frozen=True)
class TrainingSetting:
    """What decides the bytes per parameter and per value.

    Attributes
    ----------
    value_bytes : int
        4 for fp32, 2 for bf16.
    data_parallel_size : int
        Ranks that share the same stage.
    zero_stage : int
        0 or 1: ZeRO-1 divides the optimizer state.
    activation_checkpointing : bool
    reduce_bucket_values : int
        DeepSpeed's ``zero_optimization.reduce_bucket_size``, twice that with ``overlap_comm``. ZeRO-1
        allocates it whole, in fp32, however small the model is.
    """

    value_bytes: int = 4
    data_parallel_size: int = 1
    zero_stage: int = 0
    activation_checkpointing: bool = False
    reduce_bucket_values: int = 500_000_000

    def __post_init__(self) -> None:
        if self.value_bytes not in (2, 4) or self.data_parallel_size < 1 or self.zero_stage not in (0, 1):
            raise CostModelError(
                "a training setting must have value_bytes 2 or 4, data_parallel_size of at least 1 and "
                f"zero_stage 0 or 1, found {self}. Pipelines allow ZeRO-0 and ZeRO-1 only."
            )


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one rank, at its peak: while one of the microbatches in flight runs backward.

    Attributes
    ----------
    parameters_bytes, gradients_bytes, optimizer_bytes : float
    activations_bytes : float
        Kept from forward to backward, for all microbatches in flight, logits and loss included.
    recompute_bytes : float
        What the widest layer holds while it is recomputed; 0 without checkpointing.
    backward_bytes : float
        Gradients inside the layer that runs backward.
    logits_bytes : float
        What the loss holds while it runs backward.
    communication_bytes : float
        What entered the stage, for each of DeepSpeed's pipeline buffers, one received gradient, and the
        buffer in which ZeRO-1 reduces gradients.
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    recompute_bytes: float
    backward_bytes: float
    logits_bytes: float
    communication_bytes: float

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state: what lasts from step to step."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        """Sum of all parts; of backward (with recomputation) and logits, which never coincide, the larger."""
        passing = max(self.recompute_bytes + self.backward_bytes, self.logits_bytes)
        return float(self.state_bytes + self.activations_bytes + passing + self.communication_bytes)


class MemoryModel:
    """Predicted peak bytes of stages, from the activation bytes of a profile.

    Activation bytes are exact sums of tensor sizes, linear in the sizes of a microbatch: a non-negative
    fit finds the bytes per tile, per token and so on of every layer kind.

    Parameters
    ----------
    rows : sequence of ProfileRow
        With measured ``activation_bytes``.
    parameters : dict of str to int
        Number of parameters of one layer of each kind.
    dims : ModelDims
    value_bytes : int
        Bytes per value under which the rows were measured.

    Raises
    ------
    CostModelError
        If a kind has no measured bytes, or no number of parameters.
    """

    def __init__(
        self, rows: Sequence[ProfileRow], parameters: Mapping[str, int], dims: ModelDims, value_bytes: int = 4
    ) -> None:
        check_rows(rows)
        self.dims = dims
        self.parameters = dict(parameters)
        self.value_bytes = value_bytes
        self._coefficients: dict[str, FloatArray] = {}
        for kind in LAYER_KINDS:
            kind_rows = [row for row in rows if row.kind == kind]
            if not kind_rows:
                continue
            kept = np.array([row.activation_bytes for row in kind_rows], dtype=np.float64)
            if not kept.any() or kind not in self.parameters:
                raise CostModelError(
                    f"a memory model must have activation bytes and a number of parameters for {kind!r}, "
                    f"found {kept.max():.0f} bytes and {self.parameters.get(kind)} parameters. "
                    "Run `dflop-ds profile model` again."
                )
            self._coefficients[kind] = _fit(_terms(kind, MicrobatchFeatures.from_rows(kind_rows)), kept)

    def activation_bytes(self, kind: str, features: MicrobatchFeatures) -> FloatArray:
        """Bytes that one layer keeps from forward to backward without checkpointing, shape (n,)."""
        check_kind(kind)
        if kind not in self._coefficients:
            raise CostModelError(
                f"the memory model must have been fitted with rows of {kind!r}, found "
                f"{sorted(self._coefficients)}. Profile this layer kind."
            )
        kept: FloatArray = _terms(kind, features) @ self._coefficients[kind]
        return np.where(features.work_mask(kind), kept, 0.0)

    def input_bytes(self, kind: str, features: MicrobatchFeatures, value_bytes: int) -> FloatArray:
        """Bytes of the tensor that enters a layer, which is what checkpointing keeps, shape (n,)."""
        vision, hidden = self.dims.vision, self.dims.llm.hidden
        if kind == "vision_embed":
            values = features.encoder_inputs * vision.values_per_input
        elif kind in ENCODER_KINDS:
            values = features.encoder_inputs * vision.positions_per_input * vision.hidden
        elif kind == "token_embed":
            values = features.media_tokens * hidden
        else:
            values = (features.target_tokens if kind == "head" else features.llm_tokens) * hidden
        return values * float(value_bytes)

    def stage(
        self,
        stages: Sequence[Sequence[str]],
        index: int,
        features: MicrobatchFeatures,
        setting: TrainingSetting,
        training: Sequence[LayerTraining] | None = None,
    ) -> StageMemory:
        """Peak bytes of one stage on one rank.

        Parameters
        ----------
        stages : sequence of sequences of str
            Layer kinds of every stage.
        index : int
            The stage.
        features : MicrobatchFeatures
            The microbatches of a step on one replica, in any order: the peak is that of the worst order.
        setting : TrainingSetting
        training : sequence of LayerTraining, optional
            What is trained of each layer of this stage; by default everything. Frozen parameters have
            neither gradients nor optimizer state, and a layer without a backward pass keeps nothing.

        Raises
        ------
        CostModelError
            If there is no microbatch.
        """
        if not len(features):
            raise CostModelError(
                "the memory of a stage must be that of at least one microbatch, found none. Pass some."
            )
        kinds, last = list(stages[index]), index == len(stages) - 1
        states = training or [LayerTraining()] * len(kinds)
        num_parameters = float(sum(self.parameters[kind] for kind in kinds))
        num_trained = float(
            sum(self.parameters[k] * state.trainable_share for k, state in zip(kinds, states, strict=True))
        )
        kept = [kind for kind, state in zip(kinds, states, strict=True) if state.has_backward]
        scale = setting.value_bytes / self.value_bytes
        full = {kind: self.activation_bytes(kind, features) * scale for kind in dict.fromkeys(kinds)}
        nothing = np.zeros(len(features))
        widest = np.max([nothing, *(full[kind] for kind in kept)], axis=0)
        recompute = widest if setting.activation_checkpointing else nothing
        logits = self._logits_bytes(features, setting) if "head" in kinds else nothing
        if setting.activation_checkpointing:
            per_microbatch = sum((self.input_bytes(k, features, setting.value_bytes) for k in kept), nothing)
        else:
            per_microbatch = sum((full[kind] for kind in kept), nothing)
        in_flight = min(len(stages) - index, len(features))
        # What a backward pass needs belongs to the same microbatch, one of those in flight, as what it kept.
        alive = per_microbatch + _largest_others(per_microbatch, in_flight - 1)
        worst = int(np.argmax(alive + np.maximum(recompute + _BACKWARD_SHARE * widest, logits)))
        # Samples are loaded in fp32, whatever the training type.
        entering = self.input_bytes(kinds[0], features, setting.value_bytes if index else _FP32_BYTES)
        buffers = float(np.sort(entering)[::-1][: max(_FEWEST_BUFFERS, in_flight)].sum())
        if not last:
            buffers += float(self.input_bytes(stages[index + 1][0], features, setting.value_bytes).max())
        if setting.zero_stage == 1:
            buffers += _FP32_BYTES * setting.reduce_bucket_values
        return StageMemory(
            parameters_bytes=num_parameters * setting.value_bytes,
            gradients_bytes=num_trained * gradient_bytes(setting),
            optimizer_bytes=num_trained * optimizer_bytes(setting),
            activations_bytes=float(alive[worst]),
            recompute_bytes=float(recompute[worst]),
            backward_bytes=_BACKWARD_SHARE * float(widest[worst]),
            logits_bytes=float(logits[worst]),
            communication_bytes=buffers,
        )

    def _logits_bytes(self, features: MicrobatchFeatures, setting: TrainingSetting) -> FloatArray:
        """Gradients of the log-probabilities and of the logits, both in fp32, whatever the training type.

        The log-probabilities themselves are among the activations of the head, unless it is recomputed.
        """
        per_value = _FP32_BYTES * (3 if setting.activation_checkpointing else 2)
        return features.target_tokens * float(self.dims.llm.vocab * per_value)


def gradient_bytes(setting: TrainingSetting) -> float:
    """Bytes of the gradient of one parameter, its fp32 copy included."""
    return setting.value_bytes + (_FP32_BYTES if setting.value_bytes < _FP32_BYTES else 0)


def optimizer_bytes(setting: TrainingSetting) -> float:
    """Bytes of the optimizer state of one parameter on one rank."""
    copies = _MOMENTS
    if setting.value_bytes < _FP32_BYTES or setting.zero_stage == 1:
        copies += 1  # the fp32 copy of the weights that the optimizer steps
    share = setting.data_parallel_size if setting.zero_stage == 1 else 1
    return copies * _FP32_BYTES / share


def _largest_others(values: FloatArray, count: int) -> FloatArray:
    """For each value the sum of the `count` largest among all the others, shape (n,)."""
    if count == 0:
        return np.zeros(len(values))
    descending = np.sort(values)[::-1]
    among = values >= descending[count - 1]
    rest: FloatArray = np.where(among, descending[: count + 1].sum() - values, descending[:count].sum())
    return rest


def _terms(kind: str, features: MicrobatchFeatures) -> FloatArray:
    columns = [np.ones(len(features)), *(getattr(features, name) for name in _TERMS[kind])]
    return np.column_stack(columns)


def _fit(terms: FloatArray, kept: FloatArray) -> FloatArray:
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    weights = 1.0 / np.maximum(kept, 1.0)
    scales = np.maximum(np.linalg.norm(terms * weights[:, np.newaxis], axis=0), 1e-300)
    solution, _ = nnls(terms * weights[:, np.newaxis] / scales, kept * weights)
    fitted: FloatArray = np.asarray(solution, dtype=np.float64) / scales
    return fitted
