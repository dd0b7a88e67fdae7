"""Qwen2.5-VL as pipeline layers.

The blocks are those of ``transformers``. The patches of all images and clips of a microbatch form one
sequence, in the order of attention windows; attention stays inside windows, or inside frames. Layer
order: patch embedding, encoder blocks, merger, token embeddings with merge, decoder blocks with
positions on three axes, final norm, head.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLDecoderLayer,
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLRMSNorm,
    Qwen2_5_VLRotaryEmbedding,
    Qwen2_5_VLVisionBlock,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from dflop_ds.data.layout import PackedLayout
from dflop_ds.errors import ModelError
from dflop_ds.families.mrope import mrope_positions
from dflop_ds.families.qwen2_5_vl import Qwen25VlRule
from dflop_ds.models.attention import SEGMENTS_NAME, register_attention
from dflop_ds.models.layers import Carry, LayerPlan, PipelineLayer, PlanList
from dflop_ds.models.llm import (
    DecoderBlock,
    DecoderParts,
    LanguageModel,
    add_language_model,
    check_decoder,
)

_PARTS = DecoderParts(Qwen2_5_VLDecoderLayer, Qwen2_5_VLRMSNorm, Qwen2_5_VLRotaryEmbedding)


@dataclasses.dataclass(frozen=True)
class PatchOrder:
    """Order of the patches of a microbatch, and between which of them there is attention.

    Attributes
    ----------
    windowed : Tensor of int64, shape (num_tokens,)
        Merged patch that comes first, second, ... when they are sorted by window.
    row_major : Tensor of int64, shape (num_tokens,)
        The inverse.
    positions : Tensor of int64, shape (num_patches, 2)
        Row and column of each patch in its image, in the order of windows.
    window_lengths, frame_lengths : tuple of int
        Patches of each window and of each frame.
    """

    windowed: torch.Tensor
    row_major: torch.Tensor
    positions: torch.Tensor
    window_lengths: tuple[int, ...]
    frame_lengths: tuple[int, ...]

    @classmethod
    def of(cls, vector: torch.Tensor, rule: Qwen25VlRule) -> PatchOrder:
        """Order for the media of an encoded layout with patches, computed once per microbatch and stage."""
        known = _ORDERS.get(vector)
        if known is None:
            known = cls._of_media(vector, rule)
            _ORDERS[vector] = known
        return known

    @classmethod
    def _of_media(cls, vector: torch.Tensor, rule: Qwen25VlRule) -> PatchOrder:
        grids = [rule.patch_grid(item) for item in PackedLayout.decode(vector).media]
        sizes = torch.tensor([[grid.frames, grid.rows, grid.columns] for grid in grids])
        windowed, _ = get_vision_window_index(sizes, rule.merge, rule.window_px, rule.patch_px)
        positions = _by_window(get_vision_position_ids(sizes, rule.merge), windowed)
        return cls(
            windowed=windowed.to(vector.device),
            row_major=torch.argsort(windowed).to(vector.device),
            positions=positions.to(vector.device),
            window_lengths=tuple(length for grid in grids for length in rule.window_lengths(grid)),
            frame_lengths=tuple(grid.rows * grid.columns for grid in grids for _ in range(grid.frames)),
        )


_ORDERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _by_window(rows: torch.Tensor, windowed: torch.Tensor) -> torch.Tensor:
    """Sort rows, one per patch, whose merged patches are contiguous."""
    if not len(windowed):
        return rows
    return rows.unflatten(0, (len(windowed), -1))[windowed].flatten(0, 1)


class PatchEmbed(PipelineLayer):
    """Flat patches (patches, values) to embeddings in the order of windows (patches, vision hidden)."""

    kind = "vision_embed"

    def __init__(self, config: Qwen2_5_VLConfig, rule: Qwen25VlRule) -> None:
        super().__init__()
        self.rule = rule
        vision = config.vision_config
        self.patch_embed = Qwen2_5_VisionPatchEmbed(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            in_channels=vision.in_channels,
            embed_dim=vision.hidden_size,
        )

    def forward(self, carry: Carry) -> Carry:
        patches, vector = carry
        # The convolution covers a whole patch and never moves: it is a matrix product.
        weight = self.patch_embed.proj.weight.flatten(1)
        hidden = F.linear(patches.to(weight.dtype), weight)
        if len(hidden):
            hidden = _by_window(hidden, PatchOrder.of(vector, self.rule).windowed)
        return hidden, vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"patch_embed": "model.visual.patch_embed"}


class WindowBlock(PipelineLayer):
    """One encoder block with attention inside windows; a microbatch without patches passes untouched."""

    kind = "vision_window_block"

    def __init__(self, config: Qwen2_5_VLConfig, rule: Qwen25VlRule, index: int) -> None:
        super().__init__()
        self.rule = rule
        self.index = index
        self.block = Qwen2_5_VLVisionBlock(config.vision_config)
        # Not a submodule: casting the model to bf16 would round the rotary frequencies.
        self._rotary = (Qwen2_5_VLVisionRotaryEmbedding(config.vision_config),)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        if not len(hidden):
            return carry
        order = PatchOrder.of(vector, self.rule)
        # One chunk as far as the block is concerned: the attention function cuts it into segments.
        whole = torch.tensor([0, len(hidden)])
        hidden = self.block(
            hidden,
            cu_seqlens=whole,
            position_embeddings=self._position_embeddings(hidden, vector, order),
            segment_lengths=self.segment_lengths(order),
        )
        return hidden, vector

    def segment_lengths(self, order: PatchOrder) -> tuple[int, ...]:
        """Patches of each segment that attention stays in."""
        return order.window_lengths

    def _position_embeddings(
        self, hidden: torch.Tensor, vector: torch.Tensor, order: PatchOrder
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary cosine and sine, computed once per microbatch and stage; the block computes in fp32."""
        known = _ROTARY.get(vector)
        if known is None:
            known = self._rotary[0].to(hidden.device)(hidden, order.positions)
            _ROTARY[vector] = known
        return known

    def hf_prefixes(self) -> dict[str, str]:
        return {"block": f"model.visual.blocks.{self.index}"}


_ROTARY: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class FrameBlock(WindowBlock):
    """One encoder block with attention inside whole frames (an image is one frame)."""

    kind = "vision_frame_block"

    def segment_lengths(self, order: PatchOrder) -> tuple[int, ...]:
        """See :class:`WindowBlock`; a frame is contiguous in the order of windows as well."""
        return order.frame_lengths


class Merger(PipelineLayer):
    """Joins patches into media tokens (media_tokens, hidden), back in row-major order."""

    kind = "projector"

    def __init__(self, config: Qwen2_5_VLConfig, rule: Qwen25VlRule) -> None:
        super().__init__()
        self.rule = rule
        vision = config.vision_config
        self.merger = Qwen2_5_VLPatchMerger(
            dim=vision.out_hidden_size,
            context_dim=vision.hidden_size,
            spatial_merge_size=vision.spatial_merge_size,
        )

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        tokens = self.merger(hidden)
        if len(tokens):
            tokens = tokens[PatchOrder.of(vector, self.rule).row_major]
        return tokens, vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"merger": "model.visual.merger"}


class MropeBlock(DecoderBlock):
    """One decoder block with positions on three axes."""

    def __init__(self, model: LanguageModel, index: int, rule: Qwen25VlRule) -> None:
        super().__init__(model, index)
        self.rule = rule

    def position_ids(self, layout: PackedLayout) -> torch.Tensor:
        """Temporal, row and column positions of every segment, shape (3, 1, tokens)."""
        ids = layout.input_ids.cpu().numpy()
        is_media = np.isin(ids, self.model.media_ids)
        items = iter(layout.media)
        parts = []
        start = 0
        for length in layout.segment_lengths:
            of_segment = is_media[start : start + length]
            grids, missing = [], int(np.count_nonzero(of_segment))
            while missing > 0:
                grids.append(self.rule.token_grid(next(items)))
                missing -= grids[-1].num_tokens
            parts.append(mrope_positions(of_segment, grids))
            start += length
        return torch.from_numpy(np.concatenate(parts, axis=1))[:, None].to(layout.input_ids.device)


def check_config(config: Qwen2_5_VLConfig) -> None:
    """Refuse configurations whose forward pass these layers do not reproduce.

    Raises
    ------
    ModelError
    """
    text, vision = config.text_config, config.vision_config
    check_decoder(text)
    if vision.out_hidden_size != text.hidden_size:
        raise ModelError(
            f"out_hidden_size of vision_config must be the LLM's hidden_size {text.hidden_size}, found "
            f"{vision.out_hidden_size}; correct config.json."
        )
    sections = text.rope_parameters.get("mrope_section")
    head_dim = text.hidden_size // text.num_attention_heads
    if not sections or 2 * sum(sections) != head_dim:
        raise ModelError(
            f"mrope_section must be three numbers that add up to half of the head width {head_dim}, found "
            f"{sections}; correct rope_parameters in config.json."
        )


def pipeline_layers(
    config: Qwen2_5_VLConfig, *, attention: str = SEGMENTS_NAME, seed: int = 0
) -> list[LayerPlan]:
    """Plans of all layers of the model, in order; nothing is built.

    Parameters
    ----------
    config : Qwen2_5_VLConfig
        Left unchanged.
    attention : str
        Name of the attention of encoder and decoder in ``transformers.AttentionInterface``.
    seed : int
        Layer ``i`` is initialised from ``seed + i``.

    Raises
    ------
    ModelError, ConfigError
        If the layers cannot represent the model.
    """
    check_config(config)
    register_attention()
    config = copy.deepcopy(config)
    config.text_config._attn_implementation = attention
    config.vision_config._attn_implementation = attention
    rule = Qwen25VlRule.from_config(config.to_dict())
    vision, vision_std = config.vision_config, float(config.vision_config.initializer_range)
    language_model = LanguageModel(
        config.text_config,
        (config.image_token_id, config.video_token_id),
        bool(config.tie_word_embeddings),
        _PARTS,
    )

    plans = PlanList(seed)
    plans.add(PatchEmbed, vision_std, config, rule)
    for index in range(vision.depth):
        block = FrameBlock if index in vision.fullatt_block_indexes else WindowBlock
        plans.add(block, vision_std, config, rule, index)
    plans.add(Merger, vision_std, config, rule)
    add_language_model(plans, language_model, MropeBlock, rule)
    return plans
