"""A model family from outside the package, whole in one file.

An image becomes one row, and one LLM token, for every band of some pixels in height (``band_px`` in
``preprocessor_config.json``); each band is a grey strip of 32 values. The encoder is one linear layer
and one MLP. There are no clips and no audio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from dflop_ds.errors import DataError
from dflop_ds.families import (
    Family,
    MediaItem,
    MediaKind,
    MediaRule,
    Modality,
    Placeholder,
    register_family,
)
from dflop_ds.flops import LlmDims, ModelDims, VisionDims
from dflop_ds.models.attention import register_attention
from dflop_ds.models.layers import Carry, LayerPlan, PipelineLayer, PlanList
from dflop_ds.models.llm import add_language_model, qwen2_or_llama

BAND_VALUES = 32
MAX_BANDS = 40


class BandsConfig(PreTrainedConfig):
    """Configuration with a Llama language model."""

    model_type = "toy_bands"
    sub_configs: ClassVar[dict[str, type]] = {"text_config": LlamaConfig}

    text_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 0
    encoder_hidden_size: int = 24

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = LlamaConfig(**(self.text_config or {}))
        super().__post_init__(**kwargs)


@dataclasses.dataclass(frozen=True)
class BandsRule(MediaRule):
    """Media sizes: all that is known before a file is decoded."""

    image_token_id: int
    band_px: int

    @property
    def placeholders(self) -> Mapping[Modality, Placeholder]:
        return {Modality.IMAGE: Placeholder("<band>", self.image_token_id, before="[", after="]")}

    def image(self, height: int, width: int, num_images: int) -> MediaItem:
        num_bands = -(-height // self.band_px)
        if num_bands > MAX_BANDS:
            raise DataError(f"an image must have at most {MAX_BANDS} bands, found {num_bands}; shrink it.")
        return MediaItem(MediaKind.WHOLE_IMAGE, num_bands, num_bands, num_bands, (height, width))


class BandsProcessor:
    """Decoded images to rows."""

    row_shape = (BAND_VALUES,)

    def rows(self, items: Sequence[MediaItem], media: Sequence[Any]) -> list[torch.Tensor]:
        return [self._bands(image, item.num_rows) for item, image in zip(items, media, strict=True)]

    def _bands(self, image: Image.Image, num_bands: int) -> torch.Tensor:
        grey = image.convert("L").resize((BAND_VALUES, num_bands), Image.Resampling.BOX)
        return torch.from_numpy(np.asarray(grey, dtype=np.float32) / 255.0)


class Embed(PipelineLayer):
    """Rows to hidden states (rows, encoder hidden)."""

    kind = "vision_embed"

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(BAND_VALUES, hidden_size)

    def forward(self, carry: Carry) -> Carry:
        rows, vector = carry
        return self.linear(rows.to(self.linear.weight.dtype)), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"linear": "encoder.embed"}


class Block(PipelineLayer):
    """An MLP with a residual connection."""

    kind = "vision_block"

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        return hidden + torch.tanh(self.linear(hidden)), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"linear": "encoder.block"}


class Projector(PipelineLayer):
    """Hidden states to media tokens (rows, LLM hidden)."""

    kind = "projector"

    def __init__(self, hidden_size: int, llm_hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, llm_hidden_size)

    def forward(self, carry: Carry) -> Carry:
        hidden, vector = carry
        return self.linear(hidden), vector

    def hf_prefixes(self) -> dict[str, str]:
        return {"linear": "projector"}


def pipeline_layers(config: BandsConfig, *, attention: str, seed: int) -> list[LayerPlan]:
    """Plans of all layers."""
    register_attention()
    text: Any = config.text_config
    text._attn_implementation = attention
    hidden_size, std = config.encoder_hidden_size, float(text.initializer_range)
    plans = PlanList(seed)
    plans.add(Embed, std, hidden_size)
    plans.add(Block, std, hidden_size)
    plans.add(Projector, std, hidden_size, text.hidden_size)
    add_language_model(plans, qwen2_or_llama(text, (config.image_token_id,), tied=False))
    return plans


def dims(config: Mapping[str, Any]) -> ModelDims:
    """What the cost model is told: one patch per row, one head."""
    hidden_size = int(config["encoder_hidden_size"])
    encoder = VisionDims(hidden_size, hidden_size, num_heads=1, num_layers=1, tile_px=16, patch_px=16)
    return ModelDims(encoder, LlmDims.from_hf_config(config))


def make_rule(config: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> BandsRule:
    """Rule from the files of a model directory."""
    return BandsRule(int(config["image_token_id"]), int(settings["preprocessor_config"]["band_px"]))


AutoConfig.register("toy_bands", BandsConfig)
register_family(
    Family(
        model_type="toy_bands",
        rule=make_rule,
        processor=lambda model_dir, rule: BandsProcessor(),
        layers=pipeline_layers,
        dims=dims,
    )
)
