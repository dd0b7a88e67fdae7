"""A tiny Qwen2.5-VL model directory, for the data of the demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from dflop_ds.families import MediaKind

PADS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
MERGED_PX = 28
IMAGE_SIZE = {"shortest_edge": 4 * MERGED_PX**2, "longest_edge": 20 * MERGED_PX**2}
CLIP_SIZE = {"shortest_edge": 2 * MERGED_PX**2, "longest_edge": 6 * MERGED_PX**2}


def write_tiny_qwen2_5_vl(
    model_dir: Path, demo_model_dir: Path, *, tied: bool = False, seed: int = 0
) -> Path:
    """Write configuration, tokenizer (of the demo model, with pads), processors and random weights.

    Images become 4 to 20 tokens, frames 2 to 6; windows hold 2 x 2 tokens, and the second of three
    encoder blocks attends to whole frames.
    """
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    tokenizer.add_tokens(list(PADS), special_tokens=True)
    tokenizer.save_pretrained(model_dir)
    Qwen2VLImageProcessorPil(size=IMAGE_SIZE).save_pretrained(model_dir)
    (model_dir / "video_preprocessor_config.json").write_text(json.dumps({"size": CLIP_SIZE}))
    image_id, video_id, start_id, end_id = tokenizer.convert_tokens_to_ids(list(PADS))
    text: dict[str, Any] = {
        "vocab_size": 1040,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]},
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": tied,
    }
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": 48,
        "window_size": 2 * MERGED_PX,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image_id,
        video_token_id=video_id,
        vision_start_token_id=start_id,
        vision_end_token_id=end_id,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(model_dir)
    return model_dir


def hugging_face_inputs(sample: Any, dataset: Any) -> dict[str, torch.Tensor]:
    """Inputs of one loaded sample for the ``transformers`` model."""
    blocks = sample.media_values.split([item.num_rows for item in sample.media])
    inputs = {"input_ids": sample.input_ids[None]}
    kinds = {MediaKind.WHOLE_IMAGE: ("pixel_values", "image_grid_thw")}
    kinds[MediaKind.CLIP] = ("pixel_values_videos", "video_grid_thw")
    for kind, (pixels, grids) in kinds.items():
        members = [i for i, item in enumerate(sample.media) if item.kind is kind]
        if members:
            inputs[pixels] = torch.cat([blocks[i] for i in members])
            inputs[grids] = torch.tensor([sample.media[i].extent[:3] for i in members])
    if sample.media:
        ids, rule = inputs["input_ids"], dataset.rule
        is_image, is_clip = ids == rule.image_token_id, ids == rule.video_token_id
        inputs["mm_token_type_ids"] = is_image.int() + 2 * is_clip.int()
        intervals = [rule.token_grid(item).interval for item in sample.media if item.kind is MediaKind.CLIP]
        inputs["second_per_grid_ts"] = torch.tensor(intervals) / rule.tokens_per_second
    return inputs


def reference_loss(model: Any, dataset: Any, indices: list[int]) -> torch.Tensor:
    """Mean over the supervised tokens of a global batch, one sample after the other."""
    total, num_terms = torch.zeros(()), 0
    for index in indices:
        sample = dataset[index]
        inputs = hugging_face_inputs(sample, dataset)
        logits = model(**inputs).logits
        labels = sample.labels[1:]
        losses = torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum", ignore_index=-100)
        total, num_terms = total + losses, num_terms + int((labels != -100).sum())
    return total / num_terms
