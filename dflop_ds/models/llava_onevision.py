"""LLaVA-OneVision (SigLIP with Qwen2 or Llama) as pipeline layers.

The blocks are those of ``transformers``; this file only cuts the model between them and works on
packed microbatches. Layer order: vision embeddings, encoder blocks, projector, token embeddings
with merge, decoder blocks, final norm, head.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaOnevisionConfig
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipVisionEmbeddings

from dflop_ds.data.layout import MediaItem, MediaKind, PackedLayout
from dflop_ds.errors import DataError, ModelError
from dflop_ds.families.llava_onevision import LlavaOnevisionRule
from dflop_ds.models.attention import SEGMENTS_NAME, register_attention
from dflop_ds.models.layers import Carry, LayerPlan, PipelineLayer, PlanList
from dflop_ds.models.llm import add_language_model, qwen2_or_llama
from dflop_ds.models.vision import num_vision_blocks


class VisionEmbed(PipelineLayer):
    """Pixels (inputs, 3, tile, tile) to patch embeddings (inputs, patches, vision hidden)."""

    kind = "vision_embed"

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__()
        self.embeddings = SiglipVisionEmbeddings(config.vision_config)

    def forward(self, carry: Carry) -> Carry:
        pixels, layout = carry
        return self.embeddings(pixels), layout

    def hf_prefixes(self) -> dict[str, str]:
        return {"embeddings": "model.vision_tower.embeddings"}


class VisionBlock(PipelineLayer):
    """One encoder block; a microbatch without tiles passes through untouched, at no cost."""

    kind = "vision_block"

    def __init__(self, config: LlavaOnevisionConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.block = SiglipEncoderLayer(config.vision_config)

    def forward(self, carry: Carry) -> Carry:
        hidden, layout = carry
        return (self.block(hidden, None) if len(hidden) else hidden), layout

    def hf_prefixes(self) -> dict[str, str]:
        return {"block": f"model.vision_tower.encoder.layers.{self.index}"}


class Projector(PipelineLayer):
    """Patch features to the LLM's media tokens (media_tokens, hidden), newlines included."""

    kind = "projector"

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__()
        self.projector = LlavaOnevisionMultiModalProjector(config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.init_normal = ("image_newline",)
        self.rule = LlavaOnevisionRule.from_config(config.to_dict())

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        layout = PackedLayout.decode(vector)
        features = self.projector(hidden)
        if not layout.media:
            return features.flatten(0, 1) + self.image_newline, vector
        parts = features.split(layout.rows_per_item)
        tokens = [self._tokens(part, item) for part, item in zip(parts, layout.media, strict=True)]
        return torch.cat(tokens), vector

    def _tokens(self, features: torch.Tensor, item: MediaItem) -> torch.Tensor:
        """Media tokens of one item, shape (item.num_tokens, hidden)."""
        newline = self.image_newline.to(features.dtype)[None]
        if item.kind is MediaKind.CLIP:
            tokens = torch.cat([self._pool_frames(features), newline])
        elif item.kind is MediaKind.WHOLE_IMAGE:
            tokens = torch.cat([features[0], newline])
        else:
            tokens = torch.cat([features[0], self._high_resolution(features[1:], item)])
        if tokens.shape[0] != item.num_tokens:
            raise DataError(
                f"an image or clip of {item.extent} pixels must become {item.num_tokens} tokens, "
                f"the model made {tokens.shape[0]}; the data set was probed for another model: probe "
                f"it again."
            )
        return tokens

    def _pool_frames(self, features: torch.Tensor) -> torch.Tensor:
        """Halve each frame's patch grid by bilinear interpolation, shape (tokens, hidden)."""
        side = self.rule.patches_per_side
        grid = features.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        half = -(-side // 2)
        pooled = F.interpolate(grid, size=(half, half), mode="bilinear")
        return pooled.permute(0, 2, 3, 1).flatten(0, 2)

    def _high_resolution(self, tiles: torch.Tensor, item: MediaItem) -> torch.Tensor:
        """Lay the tiles out, cut the padding away, end every row with a newline token."""
        side = self.rule.patches_per_side
        tiling = self.rule.tiling(*item.extent)
        grid = tiles.view(tiling.tile_rows, tiling.tile_columns, side, side, -1)
        grid = grid.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)
        top, left = tiling.crop_top, tiling.crop_left
        grid = grid[:, top : top + tiling.kept_rows, left : left + tiling.kept_columns]
        size = (tiling.out_rows, tiling.out_columns)
        if size != (tiling.kept_rows, tiling.kept_columns):
            grid = F.interpolate(grid[None], size=size, mode="bilinear")[0]
        newline = self.image_newline.to(grid.dtype)[:, None, None].expand(-1, grid.shape[1], 1)
        return torch.cat([grid, newline], dim=2).flatten(1).transpose(0, 1)

    def hf_prefixes(self) -> dict[str, str]:
        return {"projector": "model.multi_modal_projector", "image_newline": "model.image_newline"}


def check_config(config: LlavaOnevisionConfig) -> None:
    """Refuse configurations whose forward pass these layers do not reproduce.

    Raises
    ------
    ModelError
    """
    vision = config.vision_config
    if vision.model_type != "siglip_vision_model":
        raise ModelError(
            f'vision_config.model_type must be "siglip_vision_model", found "{vision.model_type}"; '
            "use a LLaVA-OneVision checkpoint with a SigLIP tower."
        )
    if config.vision_feature_select_strategy != "full":
        raise ModelError(
            f'vision_feature_select_strategy must be "full", found '
            f'"{config.vision_feature_select_strategy}"; a SigLIP tower has no class token to drop.'
        )


def pipeline_layers(
    config: LlavaOnevisionConfig, *, attention: str = SEGMENTS_NAME, seed: int = 0
) -> list[LayerPlan]:
    """Plans of all layers of the model, in order; nothing is built.

    Parameters
    ----------
    config : LlavaOnevisionConfig
        Left unchanged.
    attention : str
        Name of the decoder's attention in ``transformers.AttentionInterface``.
    seed : int
        Layer ``i`` is initialised from ``seed + i``.
    """
    check_config(config)
    register_attention()
    config = copy.deepcopy(config)
    config.text_config._attn_implementation = attention
    config.vision_config._attn_implementation = SEGMENTS_NAME
    vision_std = float(getattr(config.vision_config, "initializer_range", 0.02))
    text_std = float(getattr(config.text_config, "initializer_range", 0.02))
    media_ids = (config.image_token_id, config.video_token_id)
    language_model = qwen2_or_llama(config.text_config, media_ids, bool(config.tie_word_embeddings))

    plans = PlanList(seed)
    plans.add(VisionEmbed, vision_std, config)
    for index in range(num_vision_blocks(config)):
        plans.add(VisionBlock, vision_std, config, index)
    plans.add(Projector, text_std, config)
    add_language_model(plans, language_model)
    return plans
