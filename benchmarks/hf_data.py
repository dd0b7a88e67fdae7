"""A synthetic multimodal data set for the Trainer: real shapes, random content, tiny LLaVA-OneVision sizes.

A sample is text, one image cut into tiles, or several whole images; content is drawn from its index.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.families.llava_onevision import LlavaOnevisionRule

IMAGE_TOKEN, VIDEO_TOKEN, PAD_TOKEN = 3, 4, 0
FIRST_TEXT_TOKEN = 8
IGNORED = -100


def tiny_llava(
    *,
    tile_px: int = 28,
    hidden: int = 16,
    vision_hidden: int = 16,
    num_layers: int = 2,
    vocab_size: int = 64,
    grid_side: int = 3,
) -> LlavaOnevisionConfig:
    """Configuration of a LLaVA-OneVision model of a few thousand parameters."""
    sides = [tile_px * k for k in range(1, grid_side + 1)]
    vision = SiglipVisionConfig(
        image_size=tile_px,
        patch_size=14,
        hidden_size=vision_hidden,
        intermediate_size=2 * vision_hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=PAD_TOKEN,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlavaOnevisionConfig(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_grid_pinpoints=[[height, width] for height in sides for width in sides],
        image_token_index=IMAGE_TOKEN,
        video_token_index=VIDEO_TOKEN,
        tie_word_embeddings=False,
    )


def build_model(config: LlavaOnevisionConfig, seed: int = 0) -> LlavaOnevisionForConditionalGeneration:
    """Model with random weights of a seed; all parameters are trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaOnevisionForConditionalGeneration(config)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Content of one sample: text tokens, and the (height, width) of its images in pixels."""

    text_tokens: int
    images_px: tuple[tuple[int, int], ...] = ()


class SyntheticSamples(Dataset[dict[str, Any]]):
    """Processed samples as a LLaVA-OneVision processor would give them.

    Parameters
    ----------
    samples : list of Sample
    config : LlavaOnevisionConfig
    seed : int
    """

    def __init__(self, samples: list[Sample], config: LlavaOnevisionConfig, seed: int = 0) -> None:
        self.samples, self._seed = samples, seed
        self._rule = LlavaOnevisionRule.from_config(config.to_dict())
        self._vocab_size = config.text_config.vocab_size

    def __len__(self) -> int:
        return len(self.samples)

    def media(self, index: int) -> tuple[list[int], list[int]]:
        """Tiles and LLM tokens of each image of a sample."""
        images = self.samples[index].images_px
        shapes = [self._rule.image(height, width, len(images)) for height, width in images]
        return [shape.num_inputs for shape in shapes], [shape.num_tokens for shape in shapes]

    def shape(self, index: int) -> dict[str, int]:
        """Sizes of a sample, for ``shape_fn`` and the benchmark."""
        tiles, tokens = self.media(index)
        return {"llm_tokens": self.samples[index].text_tokens + sum(tokens), "num_tiles": sum(tiles)}

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        tiles, tokens = self.media(index)
        rng = torch.Generator().manual_seed(self._seed * 1_000_003 + int(index))
        text = torch.randint(FIRST_TEXT_TOKEN, self._vocab_size, (sample.text_tokens,), generator=rng)
        ids = torch.cat([torch.full((sum(tokens),), IMAGE_TOKEN), text])
        labels = ids.clone()
        labels[: sum(tokens) + sample.text_tokens // 2] = IGNORED
        result: dict[str, Any] = {"input_ids": ids, "labels": labels, "length": len(ids)}
        if tiles:
            side = self._rule.tile_px
            result["pixel_values"] = torch.randn(len(tiles), max(tiles), 3, side, side, generator=rng)
            result["image_sizes"] = torch.tensor(sample.images_px)
            result["batch_num_images"] = torch.tensor([len(tiles)])
        return result


class MediaCollator:
    """Joins the media of samples; the two collators below join their text."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.join_text(features)
        with_media = [feature for feature in features if "pixel_values" in feature]
        if with_media:
            most = max(feature["pixel_values"].shape[1] for feature in with_media)
            pixels = [_pad_tiles(feature["pixel_values"], most) for feature in with_media]
            batch["pixel_values"] = torch.cat(pixels)
            for key in ("image_sizes", "batch_num_images"):
                batch[key] = torch.cat([feature[key] for feature in with_media])
        return batch

    def join_text(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Token tensors of the batch."""
        raise NotImplementedError


class PaddedCollator(MediaCollator):
    """Pads to the longest sample."""

    def join_text(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Rows of equal length."""
        longest = max(len(feature["input_ids"]) for feature in features)
        ids = torch.full((len(features), longest), PAD_TOKEN)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for row, feature in enumerate(features):
            length = len(feature["input_ids"])
            ids[row, :length], labels[row, :length], mask[row, :length] = (
                feature["input_ids"],
                feature["labels"],
                1,
            )
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class PackedCollator(MediaCollator):
    """Packs into one row; positions restart, the first label of each sample is masked."""

    def join_text(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """One row; attention stays inside a sample because positions restart."""
        labels = [feature["labels"].clone() for feature in features]
        for row in labels:
            row[0] = IGNORED
        return {
            "input_ids": torch.cat([feature["input_ids"] for feature in features])[None],
            "labels": torch.cat(labels)[None],
            "position_ids": torch.cat([torch.arange(len(f["input_ids"])) for f in features])[None],
        }


def mixed_samples(num_samples: int, seed: int, *, tile_px: int, grid_side: int = 3) -> list[Sample]:
    """A small mixture for tests: about a third text, a third lone images, a third several images."""
    rng = np.random.default_rng(seed)
    samples = []
    for kind in rng.integers(0, 3, num_samples):
        text = int(rng.integers(8, 40))
        if kind == 0:
            samples.append(Sample(text))
        elif kind == 1:
            rows, columns = rng.integers(1, grid_side + 1, 2)
            samples.append(Sample(text, ((tile_px * int(rows), tile_px * int(columns)),)))
        else:
            samples.append(Sample(text, ((tile_px, tile_px),) * int(rng.integers(2, 4))))
    return samples


def _pad_tiles(pixels: torch.Tensor, most: int) -> torch.Tensor:
    missing = most - pixels.shape[1]
    return torch.nn.functional.pad(pixels, (0, 0, 0, 0, 0, 0, 0, missing))
