"""The emulated model: which layers it has and how long each waits for a sample. No torch in here.

Times are FLOPs of a SigLIP-so400m + Qwen2.5-7B model, scaled so that a mean microbatch takes a given time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks import instances
from dflop_ds import flops
from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.model import LayerCostModel
from dflop_ds.cost.split import balanced_split
from dflop_ds.shapes import ShapeTable

FUSED_BLOCKS = 2
"""Transformer blocks that one emulated layer stands for: fewer layers, less Python between the waits."""

LAYERS = (
    ["vision_block"] * (instances.DIMS.vision.num_layers // FUSED_BLOCKS)
    + ["projector"]
    + ["decoder_block"] * (instances.DIMS.llm.num_layers // FUSED_BLOCKS)
    + ["head"]
)


def mixed_shapes(num_samples: int, seed: int) -> ShapeTable:
    """Shapes of samples of the mixed real trace, see benchmarks/traces."""
    samples = instances.draw("mixed", num_samples, seed)
    tokens, targets = samples.llm_tokens.astype(np.int64), samples.target_tokens.astype(np.int64)
    columns = {
        "num_tiles": samples.encoder_inputs.astype(np.int64),
        "num_frames": np.zeros(num_samples, dtype=np.int64),
        "text_tokens": np.minimum(tokens, 2 * targets),
        "llm_tokens": tokens,
        "target_tokens": targets,
    }
    return ShapeTable([f"sample-{index}" for index in range(num_samples)], columns)


class EmulatedTimes(LayerCostModel):
    """A cost model that predicts exactly what the emulated layers wait for.

    Parameters
    ----------
    flops_per_s : float
        Rate of the emulated device.
    """

    def __init__(self, flops_per_s: float) -> None:
        super().__init__(warn=False)
        self.flops_per_s = flops_per_s

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of one emulated layer on each microbatch."""
        vision, llm = instances.DIMS.vision, instances.DIMS.llm
        if kind == "vision_block":
            work = FUSED_BLOCKS * flops.vision_block_flops(vision, features.encoder_inputs)
        elif kind == "projector":
            work = flops.projector_flops(instances.DIMS, features.encoder_inputs)
        elif kind == "decoder_block":
            linear = flops.decoder_linear_flops(llm, features.llm_tokens)
            work = FUSED_BLOCKS * (linear + flops.decoder_attention_flops(llm, features.sum_squared_tokens))
        else:
            work = flops.head_flops(llm, features.target_tokens)
        forward_s = work / self.flops_per_s
        return forward_s, flops.BACKWARD_RATIO * forward_s

    def predict_marginal(
        self, kind: str, features: MicrobatchFeatures, samples_per_bin: float
    ) -> tuple[FloatArray, FloatArray]:
        """What a sample adds: here the whole time, as emulated times add up."""
        return self.predict(kind, features)


@dataclasses.dataclass(frozen=True, eq=False)
class EmulatedModel:
    """Times of all samples in all layers.

    Attributes
    ----------
    times : EmulatedTimes
    layer_s : ndarray, shape (num_samples, num_layers)
        Forward seconds; backward takes `flops.BACKWARD_RATIO` times as long.
    """

    times: EmulatedTimes
    layer_s: FloatArray

    @classmethod
    def scaled(
        cls, table: ShapeTable, samples_per_bin: float, num_stages: int, pass_s: float
    ) -> EmulatedModel:
        """Scale so that a mean forward of a mean microbatch takes `pass_s` in one of `num_stages` stages."""
        unit = cls.of(table, EmulatedTimes(1.0))
        mean = samples_per_bin * float(unit.layer_s.sum(axis=1).mean()) / num_stages
        return cls.of(table, EmulatedTimes(mean / pass_s))

    @classmethod
    def of(cls, table: ShapeTable, times: EmulatedTimes) -> EmulatedModel:
        """Times of these samples."""
        features = MicrobatchFeatures.from_shapes(table)
        return cls(times, np.stack([times.predict(kind, features)[0] for kind in LAYERS], axis=1))

    def boundaries(self, num_stages: int) -> list[int]:
        """First layer of every stage, and the number of layers: balanced by mean time."""
        return balanced_split(LAYERS, self.layer_s.mean(axis=0), num_stages)

    def bin_times_s(
        self, bins: Sequence[Sequence[int]], boundaries: Sequence[int]
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of every bin in every stage, shape (num_bins, num_stages)."""
        rows = [np.asarray(members, dtype=np.int64) for members in bins]
        in_bins = np.stack([self.layer_s[members].sum(axis=0) for members in rows])
        stages = [in_bins[:, a:b].sum(axis=1) for a, b in itertools.pairwise(boundaries)]
        forward_s = np.stack(stages, axis=1)
        return forward_s, flops.BACKWARD_RATIO * forward_s
