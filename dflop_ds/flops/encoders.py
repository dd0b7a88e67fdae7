"""Encoders: dimensions, and FLOPs of each layer kind per encoder input."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from dflop_ds.errors import CostModelError
from dflop_ds.flops.rules import attention_flops, check_positive, matmul_flops

IMAGE_CHANNELS = 3


class EncoderDims(Protocol):
    """What the cost model asks of an encoder, whatever its inputs are."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""

    @property
    def values_per_input(self) -> int:
        """Values of one encoder input as it enters the first layer."""

    @property
    def positions_per_input(self) -> int:
        """Positions of the residual stream that one encoder input becomes."""

    @property
    def embed_flops_per_input(self) -> float:
        """FLOPs of the layers before the first block."""

    @property
    def block_flops_per_input(self) -> float:
        """FLOPs of one block; without attention where that does not grow with the number of inputs."""

    @property
    def layer_kinds(self) -> list[str]:
        """Layer kinds of the blocks, in order."""

    def projector_flops_per_input(self, llm_hidden: int) -> float:
        """FLOPs of what lies between the last block and an LLM of this width."""


def _block_flops(hidden: int, intermediate: int, attended: int) -> float:
    """FLOPs per position: 4 attention projections, a two-layer MLP, full attention to ``attended`` ones."""
    weights = 4.0 * hidden * hidden + 2.0 * hidden * intermediate
    return 2.0 * weights + attention_flops(float(attended), hidden, causal=False)


@dataclasses.dataclass(frozen=True)
class VisionDims:
    """Dimensions of a vision transformer that encodes square tiles, with a two-layer MLP projector.

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
        check_positive(self)
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

    @property
    def values_per_input(self) -> int:
        """Pixels of a tile in all channels."""
        return IMAGE_CHANNELS * self.tile_px * self.tile_px

    @property
    def positions_per_input(self) -> int:
        """Patches of a tile."""
        return self.patches_per_tile

    @property
    def embed_flops_per_input(self) -> float:
        """One ``[patches, 3 * patch^2] @ [3 * patch^2, hidden]`` product per tile."""
        patch_values = float(IMAGE_CHANNELS * self.patch_px * self.patch_px)
        return matmul_flops(float(self.patches_per_tile), float(self.hidden), patch_values)

    @property
    def block_flops_per_input(self) -> float:
        """Every patch of a tile attends to all of them."""
        return self.patches_per_tile * _block_flops(self.hidden, self.intermediate, self.patches_per_tile)

    @property
    def layer_kinds(self) -> list[str]:
        """One kind."""
        return ["vision_block"] * self.num_layers

    def projector_flops_per_input(self, llm_hidden: int) -> float:
        """Layers ``hidden -> llm_hidden -> llm_hidden`` over every patch, before any pooling."""
        weights = float(self.hidden * llm_hidden + llm_hidden * llm_hidden)
        return 2.0 * self.patches_per_tile * weights


@dataclasses.dataclass(frozen=True)
class NativeVisionDims:
    """Dimensions of a vision transformer that takes images at their own size; an input is one patch.

    Its MLP is SwiGLU. Some blocks attend inside windows and the others inside frames, so attention
    grows with sums of squares that depend on the images, and is counted apart.

    Attributes
    ----------
    hidden, intermediate : int
        Width of the residual stream and of the MLP.
    num_heads, num_layers : int
        Attention heads and transformer blocks.
    patch_px, frames_per_patch : int
        Side of a patch in pixels, and frames that it spans.
    merge : int
        ``merge x merge`` patches become one LLM token.
    frame_layers : tuple of int
        Blocks that attend inside whole frames.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_layers: int
    patch_px: int
    frames_per_patch: int
    merge: int
    frame_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        check_positive(self, without="frame_layers")
        object.__setattr__(self, "frame_layers", tuple(self.frame_layers))
        if not all(0 <= index < self.num_layers for index in self.frame_layers):
            raise CostModelError(
                f"fullatt_block_indexes must be below depth {self.num_layers}, found "
                f"{list(self.frame_layers)}. Check vision_config of the model's config.json."
            )

    @property
    def values_per_input(self) -> int:
        """Pixels of a patch in all channels and frames."""
        return IMAGE_CHANNELS * self.frames_per_patch * self.patch_px * self.patch_px

    @property
    def positions_per_input(self) -> int:
        """One."""
        return 1

    @property
    def embed_flops_per_input(self) -> float:
        """One ``[1, values] @ [values, hidden]`` product."""
        return matmul_flops(1.0, float(self.hidden), float(self.values_per_input))

    @property
    def block_flops_per_input(self) -> float:
        """4 attention projections and the 3 of the MLP; attention itself is not included."""
        return 2.0 * (4.0 * self.hidden * self.hidden + 3.0 * self.hidden * self.intermediate)

    @property
    def layer_kinds(self) -> list[str]:
        """Windows, but for the blocks named in ``frame_layers``."""
        kinds = ["vision_window_block"] * self.num_layers
        for index in self.frame_layers:
            kinds[index] = "vision_frame_block"
        return kinds

    def projector_flops_per_input(self, llm_hidden: int) -> float:
        """Layers ``joined -> joined -> llm_hidden`` for ``merge x merge`` joined patches."""
        joined = self.hidden * self.merge * self.merge
        return 2.0 * float(joined * joined + joined * llm_hidden) / (self.merge * self.merge)


@dataclasses.dataclass(frozen=True)
class AudioDims:
    """Dimensions of a Whisper-style encoder with a linear projector; an input is one encoder position.

    Two convolutions of width 3 turn two mel frames into a position; after the blocks two positions are
    averaged into one token.

    Attributes
    ----------
    hidden, intermediate : int
        Width of the residual stream and of the two-layer MLP.
    num_heads, num_layers : int
        Attention heads and transformer blocks.
    num_mel_bins : int
        Mel bands of a frame.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_layers: int
    num_mel_bins: int

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def values_per_input(self) -> int:
        """Two mel frames."""
        return 2 * self.num_mel_bins

    @property
    def positions_per_input(self) -> int:
        """One."""
        return 1

    @property
    def embed_flops_per_input(self) -> float:
        """Width 3 from mel bands to ``hidden`` at both frames, then width 3 with stride 2."""
        first = matmul_flops(2.0, float(self.hidden), 3.0 * self.num_mel_bins)
        return first + matmul_flops(1.0, float(self.hidden), 3.0 * self.hidden)

    @property
    def block_flops_per_input(self) -> float:
        """4 attention projections and a two-layer MLP; attention itself is not included."""
        return _block_flops(self.hidden, self.intermediate, 0)

    @property
    def layer_kinds(self) -> list[str]:
        """One kind: attention inside each recording grows as that inside each frame does."""
        return ["vision_frame_block"] * self.num_layers

    def projector_flops_per_input(self, llm_hidden: int) -> float:
        """One layer ``hidden -> llm_hidden`` for two positions."""
        return matmul_flops(0.5, float(llm_hidden), float(self.hidden))
