"""InternVL: InternViT with Qwen2 or Llama."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    Qwen2Config,
)

from benchmarks.parity.compare import CLIP_CASES, IMAGE_CASES, TEXT_CASES, ParitySample, Variant

IMAGE_ID, VOCAB = 98, 100
TILE_PX = 24
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LANGUAGES = {"Qwen2": Qwen2Config, "Llama": LlamaConfig}


def make_config(
    language: str = "Qwen2", *, tied: bool = False, feature_layer: int = -1, **vision: Any
) -> InternVLConfig:
    """A tiny model of 6 x 6 patches, 9 tokens a tile."""
    options = {
        "image_size": [TILE_PX, TILE_PX],
        "patch_size": [4, 4],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "attention_bias": True,
        **vision,
    }
    return InternVLConfig(
        vision_config=InternVLVisionConfig(**options),
        text_config=_LANGUAGES[language](**_TEXT, tie_word_embeddings=tied),
        image_token_id=IMAGE_ID,
        image_seq_length=9,
        vision_feature_layer=feature_layer,
        tie_word_embeddings=tied,
    )


def reference_inputs(sample: ParitySample) -> dict[str, torch.Tensor]:
    """Tiles and frames in the order of their placeholders."""
    return {"pixel_values": sample.values} if len(sample.values) else {}


def make_variant(name: str, config: InternVLConfig) -> Variant:
    """Variant of a configuration of :func:`make_config`."""
    return Variant(
        name=name,
        config=config,
        reference=InternVLForConditionalGeneration,
        row_shape=(3, TILE_PX, TILE_PX),
        reference_inputs=reference_inputs,
        cases={**TEXT_CASES, **IMAGE_CASES, **CLIP_CASES},
    )


# As the larger models have it: RMS norms and normalised queries and keys.
_LARGE = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}

VARIANTS = [
    make_variant("InternVL, Qwen2", make_config("Qwen2")),
    make_variant("InternVL, Llama", make_config("Llama", **_LARGE)),
    make_variant("InternVL, Qwen2, tied", make_config("Qwen2", tied=True)),
]
