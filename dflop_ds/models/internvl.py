"""InternVL (InternViT with Qwen2 or Llama) as pipeline layers.

The blocks are those of ``transformers``; this file only cuts the model between them. Layer order: vision
embeddings with class token, encoder blocks, pixel shuffle and projector, then the language model.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import InternVLConfig
from transformers.models.internvl.modeling_internvl import (
    InternVLMultiModalProjector,
    InternVLVisionEmbeddings,
    InternVLVisionLayer,
)

from dflop_ds.errors import ModelError
from dflop_ds.families.internvl import InternVLRule
from dflop_ds.models.attention import SEGMENTS_NAME, register_attention
from dflop_ds.models.layers import Carry, LayerPlan, PipelineLayer, PlanList
from dflop_ds.models.llm import add_language_model, qwen2_or_llama
from dflop_ds.models.vision import num_vision_blocks


class VisionEmbed(PipelineLayer):
    """Pixels (inputs, 3, tile, tile) to embeddings (inputs, 1 + patches, vision hidden)."""

    kind = "vision_embed"

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        self.embeddings = InternVLVisionEmbeddings(config.vision_config)

    def forward(self, carry: Carry) -> Carry:
        pixels, vector = carry
        return self.embeddings(pixels), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"embeddings": "model.vision_tower.embeddings"}


class VisionBlock(PipelineLayer):
    """One encoder block; a microbatch without tiles passes through untouched, at no cost."""

    kind = "vision_block"

    def __init__(self, config: InternVLConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.block = InternVLVisionLayer(config.vision_config)
        scale = float(config.vision_config.layer_scale_init_value)
        self.init_constants = {"lambda_1": scale, "lambda_2": scale}

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        return (self.block(hidden) if len(hidden) else hidden), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"block": f"model.vision_tower.encoder.layer.{self.index}"}


class Projector(PipelineLayer):
    """Patch features to the LLM's media tokens (media_tokens, hidden)."""

    kind = "projector"

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        vision = config.vision_config
        normalised = config.vision_feature_layer == -1 and not vision.use_mean_pooling
        self.layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps) if normalised else None
        self.projector = InternVLMultiModalProjector(config)
        rule = InternVLRule.from_config(config.to_dict())
        self.side, self.factor = rule.patches_per_side, rule.factor

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        return self.projector(self._shuffle(hidden[:, 1:])).flatten(0, 1), vector

    def _shuffle(self, patches: torch.Tensor) -> torch.Tensor:
        """Each square of ``factor x factor`` patches as one long vector, (inputs, squares, values)."""
        num_inputs, _, width = patches.shape
        squares = self.side // self.factor
        grid = patches.reshape(num_inputs, squares, self.factor, squares, self.factor, width)
        grid = grid.permute(0, 1, 3, 2, 4, 5)
        return grid.reshape(num_inputs, squares * squares, self.factor * self.factor * width)

    def hf_prefixes(self) -> dict[str, str]:
        return {"layernorm": "model.vision_tower.layernorm", "projector": "model.multi_modal_projector"}


def pipeline_layers(
    config: InternVLConfig, *, attention: str = SEGMENTS_NAME, seed: int = 0
) -> list[LayerPlan]:
    """Plans of all layers of the model, in order; nothing is built.

    Parameters
    ----------
    config : InternVLConfig
        Left unchanged.
    attention : str
        Name of the decoder's attention in ``transformers.AttentionInterface``.
    seed : int
        Layer ``i`` is initialised from ``seed + i``.

    Raises
    ------
    ModelError
        If the forward pass of the configuration is not the one of these layers.
    """
    if config.vision_config.model_type != "internvl_vision":
        raise ModelError(
            f'vision_config.model_type must be "internvl_vision", found "{config.vision_config.model_type}"; '
            "use an InternVL checkpoint in the Hugging Face format."
        )
    register_attention()
    config = copy.deepcopy(config)
    config.text_config._attn_implementation = attention
    config.vision_config._attn_implementation = SEGMENTS_NAME
    vision_std = float(config.vision_config.initializer_range)
    text_std = float(getattr(config.text_config, "initializer_range", 0.02))
    language_model = qwen2_or_llama(
        config.text_config, (config.image_token_id,), bool(config.tie_word_embeddings)
    )

    plans = PlanList(seed)
    plans.add(VisionEmbed, vision_std, config)
    for index in range(num_vision_blocks(config)):
        plans.add(VisionBlock, vision_std, config, index)
    plans.add(Projector, text_std, config)
    add_language_model(plans, language_model)
    return plans
