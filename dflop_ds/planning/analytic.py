"""Layer times, activation bytes and parameters from formulas, where nothing has been measured.

Times are FLOPs over the share of the peak that kernels reach, plus bytes over memory bandwidth, plus a launch
overhead; they are predictions of a data sheet and are labelled "unmeasured" wherever they are shown.

Activation bytes count the tensors that autograd keeps of a pre-norm transformer block, as Korthikanti et al.
2022 (arXiv 2205.05198, section 4.1) do, with a fused attention kernel that keeps no score matrix (Dao et al.
2022, arXiv 2205.14135) and, in the decoder, a SwiGLU MLP (Shazeer 2020, arXiv 2002.05202).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures, ProfileRow, feature_names
from dflop_ds.cost.layer_model import SCHEMA_VERSION, LayerCostModel
from dflop_ds.cost.memory import MemoryModel
from dflop_ds.cost.prior import DIRECTIONS, OVERHEAD, prior_terms
from dflop_ds.errors import ConfigError
from dflop_ds.flops import ModelDims, NativeVisionDims, attention_flops
from dflop_ds.planning.hardware import Hardware

_NUM_SIZES = 24
_SIZE_FIELDS = [field.name for field in dataclasses.fields(MicrobatchFeatures)]


def model_layers(dims: ModelDims) -> list[str]:
    """Kind of every pipeline layer of a model, in order."""
    layers = ["vision_embed", *dims.vision.layer_kinds, "projector", "token_embed"]
    return [*layers, *["decoder_block"] * dims.llm.num_layers, "norm", "head"]


def parameter_counts(dims: ModelDims) -> dict[str, int]:
    """Parameters of one layer of each kind; biases and norms as models of fixed tiles have them.

    The projector's weights are counted by its FLOPs, so that one that joins positions first is too small.
    """
    encoder, llm = dims.vision, dims.llm
    query, key_value = llm.num_heads * llm.head_dim, llm.num_kv_heads * llm.head_dim
    # A weight is one multiply-add per position; blocks of fixed tiles count their attention as well.
    positions, per_weight = encoder.positions_per_input, 2.0 * encoder.positions_per_input
    attention = 0.0
    if positions > 1:
        attention = attention_flops(float(positions * positions), encoder.hidden, causal=False)
    block = round((encoder.block_flops_per_input - attention) / per_weight)
    decoder = llm.hidden * (2 * query + 2 * key_value + 3 * llm.intermediate + 2) + query + 2 * key_value
    return {
        "vision_embed": round(encoder.embed_flops_per_input / per_weight) + encoder.hidden * (1 + positions),
        **dict.fromkeys(encoder.layer_kinds, block + 9 * encoder.hidden + encoder.intermediate),
        "projector": round(encoder.projector_flops_per_input(llm.hidden) / per_weight) + 3 * llm.hidden,
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

    Raises
    ------
    ConfigError
        If the hardware names no peak of this type.
    """
    peak = hardware.peak_flops_per_s.get("bfloat16" if dtype == "bfloat16" else "float32")
    if peak is None:
        raise ConfigError(
            f"peak_flops_per_s of {hardware.name} must name {dtype}, in which the model trains, found "
            f"{sorted(hardware.peak_flops_per_s)}. Add it, or measure a profile."
        )
    seconds_per_unit = {
        "flops": 1.0 / (peak * hardware.matmul_share),
        "attention_flops": 1.0 / (peak * hardware.attention_share),
        "bytes": 1.0 / hardware.memory_bytes_per_s,
        "segments": 0.0,
        OVERHEAD: hardware.layer_overhead_s,
    }
    nothing = MicrobatchFeatures(*(np.zeros(0) for _ in _SIZE_FIELDS))
    kinds = {}
    for kind in dict.fromkeys(model_layers(dims)):
        entry: dict[str, Any] = {"ranges": [[0.0, np.inf]] * len(feature_names(kind))}
        for direction in DIRECTIONS:
            names = (OVERHEAD, *prior_terms(kind, direction, nothing, dims))
            entry[direction] = {"prior": {name: seconds_per_unit[name] for name in names}, "trees": None}
        kinds[kind] = entry
    content = {"schema_version": SCHEMA_VERSION, "dims": dims.to_dict(), "kinds": kinds}
    return LayerCostModel.from_dict(content, warn=False)


def analytic_memory_model(dims: ModelDims, value_bytes: int) -> MemoryModel:
    """Memory model from the formulas of this module."""
    rng = np.random.default_rng(0)
    sizes = {name: rng.integers(1, 4096, _NUM_SIZES) for name in _SIZE_FIELDS}
    features = MicrobatchFeatures(*(sizes[name].astype(np.float64) for name in _SIZE_FIELDS))
    rows = []
    for kind in dict.fromkeys(model_layers(dims)):
        kept = np.rint(_kept_bytes(kind, dims, features, value_bytes)).astype(np.int64)
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


def _kept_bytes(kind: str, dims: ModelDims, features: MicrobatchFeatures, value_bytes: int) -> FloatArray:
    """Bytes that one layer keeps for its backward pass."""
    encoder, llm = dims.vision, dims.llm
    positions = features.encoder_inputs * encoder.positions_per_input
    if kind == "vision_embed":
        values = features.encoder_inputs * float(encoder.values_per_input)
    elif kind in encoder.layer_kinds:
        # Two norms (input and output), query, key, value, attention output; both sides of the activation,
        # and of the gate where there is one.
        gated = isinstance(encoder, NativeVisionDims)
        values = positions * float(8 * encoder.hidden + (4 if gated else 2) * encoder.intermediate)
    elif kind == "projector":
        values = positions * float(encoder.hidden + 2 * llm.hidden) + features.media_tokens * llm.hidden
    elif kind == "token_embed":
        # Token ids, and where the media go: two 64-bit integers a token.
        return features.llm_tokens * 16.0
    elif kind == "decoder_block":
        heads = llm.num_heads + llm.num_kv_heads
        # Two norms; query, key, value before and after rotation; attention output; gate, up, act, product.
        per_token = 4 * llm.hidden + 3 * heads * llm.head_dim + 4 * llm.intermediate
        values = features.llm_tokens * float(per_token)
    elif kind == "norm":
        values = features.llm_tokens * 2.0 * llm.hidden
    else:
        # The log-probabilities stay in fp32.
        log_probabilities = features.target_tokens * 4.0 * llm.vocab
        return features.target_tokens * float(llm.hidden * value_bytes) + log_probabilities
    return values * float(value_bytes)
