"""Qwen2.5-VL: native resolution, attention windows, positions on three axes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.parity.compare import (
    CLIP_CASES,
    CLIP_INTERVAL_S,
    IMAGE_CASES,
    TEXT_CASES,
    Media,
    ParitySample,
    Variant,
)
from dflop_ds.families import MediaKind
from dflop_ds.families.qwen2_5_vl import Qwen25VlRule

IMAGE_ID, VIDEO_ID, VOCAB = 98, 99, 100
PATCH_PX, MERGE, FRAMES_PER_PATCH = 4, 2, 2
_PROCESSOR = {
    "patch_size": PATCH_PX,
    "merge_size": MERGE,
    "temporal_patch_size": FRAMES_PER_PATCH,
    "min_pixels": 100,
    "max_pixels": 10_000,
}
SETTINGS = {"preprocessor_config": _PROCESSOR}

REFUSED = ("image 1x499", "image 1093x5")
"""Too long for the processor, so that the rule refuses them as well."""

_OWN_CASES = {
    "image 1x200": [Media(((1, 200),))],
    "image of 25 windows": [Media(((150, 150),))],
    "unequal clips": [Media(((50, 33),), (3, 8))],
}


def make_config(*, tied: bool = False) -> Qwen2_5_VLConfig:
    """A tiny model: windows of 3 x 3 tokens, one of three encoder blocks attends to whole frames."""
    text: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": tied,
    }
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES_PER_PATCH,
        "window_size": 3 * MERGE * PATCH_PX,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 3,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=96,
        vision_end_token_id=97,
        tie_word_embeddings=tied,
    )


def reference_inputs(sample: ParitySample) -> dict[str, torch.Tensor]:
    """Patches with their grids, what each token stands for, and the seconds between temporal patches."""
    inputs: dict[str, torch.Tensor] = {}
    images, clips = sample.values_of(MediaKind.WHOLE_IMAGE), sample.values_of(MediaKind.CLIP)
    if images:
        inputs["pixel_values"] = torch.cat(images)
        inputs["image_grid_thw"] = _grids(sample, MediaKind.WHOLE_IMAGE)
    if clips:
        inputs["pixel_values_videos"] = torch.cat(clips)
        inputs["video_grid_thw"] = _grids(sample, MediaKind.CLIP)
        inputs["second_per_grid_ts"] = torch.full((len(clips),), FRAMES_PER_PATCH * CLIP_INTERVAL_S)
    if images or clips:
        ids = sample.input_ids[None]
        inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
    return inputs


def _grids(sample: ParitySample, kind: MediaKind) -> torch.Tensor:
    """Grids of the items of a kind, shape (num_items, 3)."""
    return torch.tensor([item.extent[:3] for item in sample.items if item.kind is kind])


def make_variant(name: str, config: Qwen2_5_VLConfig) -> Variant:
    """Variant of a configuration of :func:`make_config`."""
    cases = {**TEXT_CASES, **IMAGE_CASES, **_OWN_CASES, **CLIP_CASES}
    rule = Qwen25VlRule.from_config(config.to_dict(), SETTINGS)
    return Variant(
        name=name,
        config=config,
        reference=Qwen2_5_VLForConditionalGeneration,
        row_shape=(rule.values_per_patch,),
        reference_inputs=reference_inputs,
        cases={case: media for case, media in cases.items() if case not in REFUSED},
        settings=SETTINGS,
    )


VARIANTS = [
    make_variant("Qwen2.5-VL", make_config()),
    make_variant("Qwen2.5-VL, tied", make_config(tied=True)),
]
