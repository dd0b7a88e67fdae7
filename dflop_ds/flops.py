"""FLOP and byte counts of the layers of a multimodal LLM, from the dimensions of the model.

The rules, with their sources:

- A product of an ``[m, k]`` and a ``[k, n]`` matrix is ``m * n * k`` multiply-adds, ``2 * m * n * k``
  FLOPs (Narayanan et al. 2021, arXiv 2104.04473, appendix).
- Attention over one segment of ``L`` tokens is two such products, ``Q K^T`` and ``P V``:
  ``2 * 2 * L^2 * width`` FLOPs with ``width = num_heads * head_dim``; a causal kernel skips half
  (Dao 2023, arXiv 2307.08691, section 4.1).
- The gradients of a product with respect to its input and to its weight are one product of the same
  size each, so backward is twice forward (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
- SwiGLU has three projections, gate, up and down (Shazeer 2020, arXiv 2002.05202).

Norms, biases, activations and softmax are left out of the FLOP counts: they are bound by memory, and
per token they are proportional to terms that are counted. Counts are per layer and forward only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import CostModelError

Count = TypeVar("Count", float, npt.NDArray[np.float64])
"""A plain number, or an array of float64 with one entry per microbatch."""

BACKWARD_RATIO = 2.0
"""Backward over forward: one product for the input gradient and one for the weight gradient."""

IMAGE_CHANNELS = 3
BYTES_PER_VALUE = 2.0
"""Bytes of a bfloat16 or float16 value."""


def _check_positive(owner: object) -> None:
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CostModelError(
                f"{type(owner).__name__}.{field.name} must be a whole number of at least 1, found {value!r}. "
                "Check the model's config.json."
            )


@dataclasses.dataclass(frozen=True)
class VisionDims:
    """Dimensions of a vision transformer that encodes square tiles.

    Attributes
    ----------
    hidden, intermediate : int
        Width of the residual stream and of the two-layer MLP.
    num_heads, num_layers : int
        Attention heads and transformer blocks.
    tile_px, patch_px : int
        Side of a tile and of a patch in pixels.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_layers: int
    tile_px: int
    patch_px: int

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.patch_px > self.tile_px:
            raise CostModelError(
                f"a tile must hold a patch, found tile_px={self.tile_px} and patch_px={self.patch_px}. "
                "Check image_size and patch_size of vision_config."
            )

    @property
    def patches_per_tile(self) -> int:
        """Patches of one tile; a border narrower than a patch is cut off, as the convolution does."""
        per_side = self.tile_px // self.patch_px
        return per_side * per_side


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
        _check_positive(self)


@dataclasses.dataclass(frozen=True)
class ModelDims:
    """Dimensions of an encoder, a two-layer MLP projector and an LLM.

    Attributes
    ----------
    vision : VisionDims
    llm : LlmDims
    """

    vision: VisionDims
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
        text = _part(config, "text_config")
        num_heads = _entry(text, "text_config", "num_attention_heads")
        hidden = _entry(text, "text_config", "hidden_size")
        return cls(
            vision=VisionDims(
                hidden=_entry(vision, "vision_config", "hidden_size"),
                intermediate=_entry(vision, "vision_config", "intermediate_size"),
                num_heads=_entry(vision, "vision_config", "num_attention_heads"),
                num_layers=_entry(vision, "vision_config", "num_hidden_layers"),
                tile_px=_entry(vision, "vision_config", "image_size"),
                patch_px=_entry(vision, "vision_config", "patch_size"),
            ),
            llm=LlmDims(
                hidden=hidden,
                intermediate=_entry(text, "text_config", "intermediate_size"),
                num_heads=num_heads,
                num_kv_heads=_entry(text, "text_config", "num_key_value_heads", num_heads),
                head_dim=_entry(text, "text_config", "head_dim", hidden // num_heads),
                num_layers=_entry(text, "text_config", "num_hidden_layers"),
                vocab=_entry(text, "text_config", "vocab_size"),
            ),
        )

    def to_dict(self) -> dict[str, dict[str, int]]:
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
            return cls(vision=VisionDims(**data["vision"]), llm=LlmDims(**data["llm"]))
        except (KeyError, TypeError) as error:
            raise CostModelError(
                f"dimensions must have the fields of VisionDims and LlmDims; {error!r}. Write the file again."
            ) from error


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


def matmul_flops(m: Count, n: Count, k: Count) -> Count:
    """FLOPs of an ``[m, k] @ [k, n]`` product: ``2 * m * n * k``."""
    return 2.0 * m * n * k


def attention_flops(sum_squared_tokens: Count, width: int, *, causal: bool) -> Count:
    """FLOPs of attention inside segments: ``4 * width * sum(L^2)``, half of it when causal.

    Parameters
    ----------
    sum_squared_tokens : float or ndarray
        Sum over the segments of length squared, in tokens^2.
    width : int
        Heads times head width.
    causal : bool
        Whether a token sees only itself and earlier tokens.
    """
    return (2.0 if causal else 4.0) * width * sum_squared_tokens


def vision_embed_flops(dims: VisionDims, encoder_inputs: Count) -> Count:
    """FLOPs of the patch convolution, one ``[patches, 3 * patch^2] @ [3 * patch^2, hidden]`` per tile."""
    patch_values = IMAGE_CHANNELS * dims.patch_px * dims.patch_px
    return (
        matmul_flops(float(dims.patches_per_tile), float(dims.hidden), float(patch_values)) * encoder_inputs
    )


def vision_block_flops(dims: VisionDims, encoder_inputs: Count) -> Count:
    """FLOPs of one encoder block: 4 attention projections, a two-layer MLP, full attention per tile."""
    patches = float(dims.patches_per_tile)
    weights = 4.0 * dims.hidden * dims.hidden + 2.0 * dims.hidden * dims.intermediate
    per_tile = 2.0 * patches * weights + attention_flops(patches * patches, dims.hidden, causal=False)
    return per_tile * encoder_inputs


def projector_flops(dims: ModelDims, encoder_inputs: Count) -> Count:
    """FLOPs of the two-layer MLP projector over every patch, before any pooling.

    The layers map ``vision.hidden -> llm.hidden -> llm.hidden``.
    """
    weights = float(dims.vision.hidden * dims.llm.hidden + dims.llm.hidden * dims.llm.hidden)
    return 2.0 * dims.vision.patches_per_tile * weights * encoder_inputs


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


def copy_bytes(num_tokens: Count, hidden: int, bytes_per_value: float = BYTES_PER_VALUE) -> Count:
    """Bytes moved by a layer that reads and writes each hidden state once.

    This is the traffic of an embedding look-up, of a norm, of writing media features into the
    sequence and of selecting the supervised positions.
    """
    return 2.0 * hidden * bytes_per_value * num_tokens
