"""Layer times, activation bytes and parameters from formulas, where nothing has been measured.

Times are FLOPs over the share of the peak that kernels reach, plus bytes over memory bandwidth, plus a launch
overhead; they are predictions of a data sheet and are labelled "unmeasured" wherever they are shown.

Activation bytes count the tensors that autograd keeps of a pre-norm transformer block, as Korthikanti et al.
2022 (arXiv 2205.05198, section 4.1) do, with a fused attention kernel that keeps no score matrix (Dao et al.
2022, arXiv 2205.14135) and, in the decoder, a SwiGLU MLP (Shazeer 2020, arXiv 2002.05202).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures, ProfileRow, feature_names
from dflop_ds.cost.layer_model import SCHEMA_VERSION, LayerCostModel
from dflop_ds.cost.memory import MemoryModel
from dflop_ds.cost.prior import DIRECTIONS, OVERHEAD, prior_terms
from dflop_ds.flops import IMAGE_CHANNELS, ModelDims
from dflop_ds.planning.hardware import Hardware

_NUM_SIZES = 24
_SIZE_FIELDS = [field.name for field in dataclasses.fields(MicrobatchFeatures)]


def layer_kinds(dims: ModelDims) -> list[str]:
    """Kind of every pipeline layer of the model, in order."""
    kinds = ["vision_embed", *["vision_block"] * dims.vision.num_layers, "projector", "token_embed"]
    return [*kinds, *["decoder_block"] * dims.llm.num_layers, "norm", "head"]


def parameter_counts(dims: ModelDims) -> dict[str, int]:
    """Parameters of one layer of each kind; biases and norms included where such models have them."""
    vision, llm = dims.vision, dims.llm
    query, key_value = llm.num_heads * llm.head_dim, llm.num_kv_heads * llm.head_dim
    patch_values = IMAGE_CHANNELS * vision.patch_px**2
    attention = 4 * vision.hidden * (vision.hidden + 1)
    mlp = 2 * vision.hidden * vision.intermediate + vision.hidden + vision.intermediate
    decoder = llm.hidden * (2 * query + 2 * key_value + 3 * llm.intermediate + 2) + query + 2 * key_value
    return {
        "vision_embed": vision.hidden * (patch_values + 1 + vision.patches_per_tile),
        "vision_block": attention + mlp + 4 * vision.hidden,
        "projector": llm.hidden * (vision.hidden + llm.hidden + 3),
        "token_embed": llm.vocab * llm.hidden,
        "decoder_block": decoder,
        "norm": llm.hidden,
        "head": llm.vocab * llm.hidden,
    }


def analytic_layer_model(dims: ModelDims, hardware: Hardware, dtype: str) -> LayerCostModel:
    """Cost model whose coefficients are those of the data sheet.

    Parameters
    ----------
    dims : ModelDims
    hardware : Hardware
    dtype : {"float32", "bfloat16"}
    """
    peak = hardware.peak_flops_per_s["bfloat16" if dtype == "bfloat16" else "float32"]
    seconds_per_unit = {
        "flops": 1.0 / (peak * hardware.matmul_share),
        "attention_flops": 1.0 / (peak * hardware.attention_share),
        "bytes": 1.0 / hardware.memory_bytes_per_s,
        "segments": 0.0,
        OVERHEAD: hardware.layer_overhead_s,
    }
    nothing = MicrobatchFeatures(*(np.zeros(0) for _ in _SIZE_FIELDS))
    kinds = {}
    for kind in dict.fromkeys(layer_kinds(dims)):
        priors = {
            direction: {
                "prior": {
                    name: seconds_per_unit[name]
                    for name in (OVERHEAD, *prior_terms(kind, direction, nothing, dims))
                },
                "trees": None,
            }
            for direction in DIRECTIONS
        }
        kinds[kind] = {"ranges": [[0.0, np.inf]] * len(feature_names(kind)), **priors}
    content = {"schema_version": SCHEMA_VERSION, "dims": dims.to_dict(), "kinds": kinds}
    return LayerCostModel.from_dict(content, warn=False)


def analytic_memory_model(dims: ModelDims, value_bytes: int) -> MemoryModel:
    """Memory model from the formulas of this module."""
    rng = np.random.default_rng(0)
    sizes = {name: rng.integers(1, 4096, _NUM_SIZES) for name in _SIZE_FIELDS}
    features = MicrobatchFeatures(*(sizes[name].astype(np.float64) for name in _SIZE_FIELDS))
    rows = []
    for kind in dict.fromkeys(layer_kinds(dims)):
        kept = np.rint(_kept_values(kind, dims, features) * value_bytes).astype(np.int64)
        rows += [
            ProfileRow(
                kind=kind,
                **{name: int(sizes[name][index]) for name in _SIZE_FIELDS},
                forward_s=0.0,
                backward_s=0.0,
                activation_bytes=int(kept[index]),
            )
            for index in range(_NUM_SIZES)
        ]
    return MemoryModel(rows, parameter_counts(dims), dims, value_bytes)


def _kept_values(kind: str, dims: ModelDims, features: MicrobatchFeatures) -> FloatArray:
    """Values that one layer keeps for its backward pass."""
    vision, llm = dims.vision, dims.llm
    patches = features.encoder_inputs * vision.patches_per_tile
    if kind == "vision_embed":
        return features.encoder_inputs * IMAGE_CHANNELS * vision.tile_px**2
    if kind == "vision_block":
        # Two norms (input and output), query, key, value, attention output; both sides of the activation.
        return patches * (8 * vision.hidden + 2 * vision.intermediate)
    if kind == "projector":
        return patches * (vision.hidden + 2 * llm.hidden) + features.media_tokens * llm.hidden
    if kind == "token_embed":
        # Token ids, and where the media go: two 64-bit integers a token.
        return features.llm_tokens * 8.0
    if kind == "decoder_block":
        heads = llm.num_heads + llm.num_kv_heads
        # Two norms; query, key, value before and after rotation; attention output; gate, up, act, product.
        values = 4 * llm.hidden + 3 * heads * llm.head_dim + 4 * llm.intermediate
        return features.llm_tokens * float(values)
    if kind == "norm":
        return features.llm_tokens * 2.0 * llm.hidden
    return features.target_tokens * float(llm.hidden)
