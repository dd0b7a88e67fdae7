"""LLaVA-OneVision: SigLIP with Qwen2 or Llama."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from benchmarks.parity.compare import CLIP_CASES, IMAGE_CASES, TEXT_CASES, ParitySample, Variant
from dflop_ds.families import MediaKind

IMAGE_ID, VIDEO_ID, VOCAB = 98, 99, 100
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
    language: str = "Qwen2", *, tied: bool = False, feature_layer: int = -1
) -> LlavaOnevisionConfig:
    """A tiny model whose patch map is odd, so that pooling rounds up."""
    vision = SiglipVisionConfig(
        image_size=20,
        patch_size=4,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        vision_use_head=False,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=_LANGUAGES[language](**_TEXT, tie_word_embeddings=tied),
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        image_grid_pinpoints=[[20 * i, 20 * j] for i in range(1, 5) for j in range(1, 5)],
        vision_aspect_ratio="anyres_max_4",
        vision_feature_layer=feature_layer,
        tie_word_embeddings=tied,
    )


def reference_inputs(sample: ParitySample) -> dict[str, torch.Tensor]:
    """Tiles padded to the most of them, sizes, and frames."""
    tiles = sample.values_of(MediaKind.TILED_IMAGE, MediaKind.WHOLE_IMAGE)
    clips = sample.values_of(MediaKind.CLIP)
    inputs: dict[str, torch.Tensor] = {}
    if tiles:
        most = max(len(block) for block in tiles)
        padded = [torch.cat([b, b.new_zeros(most - len(b), *b.shape[1:])]) for b in tiles]
        inputs["pixel_values"] = torch.stack(padded)
        inputs["image_sizes"] = torch.tensor(sample.media.images)
        inputs["batch_num_images"] = torch.tensor([len(tiles)])
    if clips:
        # The reference stacks clips, so a sample must have clips of the same length only.
        inputs["pixel_values_videos"] = torch.stack(clips)
    return inputs


def make_variant(name: str, config: LlavaOnevisionConfig) -> Variant:
    """Variant of a configuration of :func:`make_config`."""
    return Variant(
        name=name,
        config=config,
        reference=LlavaOnevisionForConditionalGeneration,
        row_shape=(3, 20, 20),
        reference_inputs=reference_inputs,
        cases={**TEXT_CASES, **IMAGE_CASES, **CLIP_CASES},
    )


VARIANTS = [
    make_variant("LLaVA-OneVision, Qwen2", make_config("Qwen2")),
    make_variant("LLaVA-OneVision, Llama", make_config("Llama")),
    make_variant("LLaVA-OneVision, Qwen2, tied", make_config("Qwen2", tied=True)),
]
