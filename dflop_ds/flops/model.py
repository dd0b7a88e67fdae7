"""Dimensions of whole models, and FLOPs of their layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflop_ds.errors import CostModelError
from dflop_ds.flops.encoders import AudioDims, EncoderDims, NativeVisionDims, VisionDims
from dflop_ds.flops.rules import Count, attention_flops, check_positive


@dataclasses.dataclass(frozen=True)
class LlmDims:
    """Dimensions of a decoder-only LLM with grouped-query attention and a SwiGLU MLP.

    Attributes
    ----------
    hidden, intermediate : int
        Width of the residual stream and of the MLP.
    num_heads, num_kv_heads, head_dim : int
        Query heads, key-value heads and the width of a head.
    num_layers, vocab : int
        Decoder blocks and vocabulary size.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab: int

    def __post_init__(self) -> None:
        check_positive(self)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> LlmDims:
        """Read the dimensions from a ``config.json`` with ``text_config``.

        Raises
        ------
        CostModelError
            If a value is missing or is not a positive whole number.
        """
        text = _part(config, "text_config")
        num_heads = _entry(text, "text_config", "num_attention_heads")
        hidden = _entry(text, "text_config", "hidden_size")
        return cls(
            hidden=hidden,
            intermediate=_entry(text, "text_config", "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_entry(text, "text_config", "num_key_value_heads", num_heads),
            head_dim=_entry(text, "text_config", "head_dim", hidden // num_heads),
            num_layers=_entry(text, "text_config", "num_hidden_layers"),
            vocab=_entry(text, "text_config", "vocab_size"),
        )


@dataclasses.dataclass(frozen=True)
class ModelDims:
    """Dimensions of an encoder with its projector, and of an LLM.

    Attributes
    ----------
    vision : VisionDims, NativeVisionDims or AudioDims
        The encoder.
    llm : LlmDims
    """

    vision: VisionDims | NativeVisionDims | AudioDims
    llm: LlmDims

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Read the dimensions from a ``config.json`` with ``vision_config`` and ``text_config``.

        Parameters
        ----------
        config : mapping
            LLaVA-OneVision style. ``num_key_value_heads`` falls back on ``num_attention_heads`` and
            ``head_dim`` on ``hidden_size / num_attention_heads``.

        Raises
        ------
        CostModelError
            If a part or a value is missing or is not a positive whole number.
        """
        vision = _part(config, "vision_config")
        return cls(
            vision=VisionDims(
                hidden=_entry(vision, "vision_config", "hidden_size"),
                intermediate=_entry(vision, "vision_config", "intermediate_size"),
                num_heads=_entry(vision, "vision_config", "num_attention_heads"),
                num_layers=_entry(vision, "vision_config", "num_hidden_layers"),
                tile_px=_entry(vision, "vision_config", "image_size"),
                patch_px=_entry(vision, "vision_config", "patch_size"),
            ),
            llm=LlmDims.from_hf_config(config),
        )

    @classmethod
    def from_audio_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Read the dimensions from a ``config.json`` with ``audio_config`` and ``text_config``.

        Parameters
        ----------
        config : mapping
            Qwen2-Audio style, see :meth:`from_hf_config`.

        Raises
        ------
        CostModelError
            If a part or a value is missing or is not a positive whole number.
        """
        audio = _part(config, "audio_config")
        return cls(
            vision=AudioDims(
                hidden=_entry(audio, "audio_config", "d_model"),
                intermediate=_entry(audio, "audio_config", "encoder_ffn_dim"),
                num_heads=_entry(audio, "audio_config", "encoder_attention_heads"),
                num_layers=_entry(audio, "audio_config", "encoder_layers"),
                num_mel_bins=_entry(audio, "audio_config", "num_mel_bins"),
            ),
            llm=LlmDims.from_hf_config(config),
        )

    @classmethod
    def from_native_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Read the dimensions of a model with an encoder of native resolution.

        Parameters
        ----------
        config : mapping
            Qwen2.5-VL style, see :meth:`from_hf_config`; without ``text_config`` the LLM is described by
            the configuration itself, as in published files.

        Raises
        ------
        CostModelError
            If a part or a value is missing or is not a positive whole number.
        """
        vision = _part(config, "vision_config")
        return cls(
            vision=NativeVisionDims(
                hidden=_entry(vision, "vision_config", "hidden_size"),
                intermediate=_entry(vision, "vision_config", "intermediate_size"),
                num_heads=_entry(vision, "vision_config", "num_heads"),
                num_layers=_entry(vision, "vision_config", "depth"),
                patch_px=_entry(vision, "vision_config", "patch_size"),
                frames_per_patch=_entry(vision, "vision_config", "temporal_patch_size"),
                merge=_entry(vision, "vision_config", "spatial_merge_size"),
                frame_layers=tuple(vision.get("fullatt_block_indexes") or ()),
            ),
            llm=LlmDims.from_hf_config(config if "text_config" in config else {"text_config": config}),
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain dict, the inverse of :meth:`from_dict`."""
        return {"vision": dataclasses.asdict(self.vision), "llm": dataclasses.asdict(self.llm)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelDims:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        CostModelError
            If a field is missing, unknown or not a positive whole number.
        """
        try:
            encoder = _encoder_class(data["vision"])
            return cls(vision=encoder(**data["vision"]), llm=LlmDims(**data["llm"]))
        except (KeyError, TypeError) as error:
            raise CostModelError(
                "dimensions must have the fields of an encoder (VisionDims or another) and of LlmDims; "
                f"{error!r}. Write the file again."
            ) from error


def _encoder_class(data: Mapping[str, Any]) -> type[VisionDims | NativeVisionDims | AudioDims]:
    if "num_mel_bins" in data:
        return AudioDims
    return NativeVisionDims if "merge" in data else VisionDims


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    if not isinstance(part, Mapping):
        raise CostModelError(
            f"the model config must have a {name!r} object, found {type(part).__name__}. "
            "Pass the whole config.json of the multimodal model."
        )
    return part


def _entry(part: Mapping[str, Any], part_name: str, key: str, default: int | None = None) -> int:
    value = part.get(key)
    if value is None:
        value = default
    if isinstance(value, (list, tuple)) and value and all(item == value[0] for item in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CostModelError(
            f"{part_name}.{key} must be a whole number of at least 1, found {value!r}. "
            "Write the value into the model's config.json; defaults of the architecture are not guessed."
        )
    return value


def vision_embed_flops(dims: EncoderDims, encoder_inputs: Count) -> Count:
    """FLOPs of the encoder's layers before the first block."""
    return dims.embed_flops_per_input * encoder_inputs


def vision_block_flops(dims: EncoderDims, encoder_inputs: Count) -> Count:
    """FLOPs of one encoder block."""
    return dims.block_flops_per_input * encoder_inputs


def projector_flops(dims: ModelDims, encoder_inputs: Count) -> Count:
    """FLOPs of the projector."""
    return dims.vision.projector_flops_per_input(dims.llm.hidden) * encoder_inputs


def decoder_linear_flops(dims: LlmDims, llm_tokens: Count) -> Count:
    """FLOPs of the seven projections of a decoder block: query, key, value, output, gate, up, down."""
    query = dims.num_heads * dims.head_dim
    key_value = dims.num_kv_heads * dims.head_dim
    weights = dims.hidden * (2 * query + 2 * key_value) + 3 * dims.hidden * dims.intermediate
    return 2.0 * float(weights) * llm_tokens


def decoder_attention_flops(dims: LlmDims, sum_squared_tokens: Count) -> Count:
    """FLOPs of causal attention inside the packed segments; shared key-value heads save no FLOPs."""
    return attention_flops(sum_squared_tokens, dims.num_heads * dims.head_dim, causal=True)


def head_flops(dims: LlmDims, target_tokens: Count) -> Count:
    """FLOPs of the vocabulary projection, ``2 * hidden * vocab`` per supervised position."""
    return 2.0 * float(dims.hidden * dims.vocab) * target_tokens
