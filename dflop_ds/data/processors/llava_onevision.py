"""LLaVA-OneVision: tiles of images and frames of clips as square encoder inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlavaOnevisionImageProcessorPil

from dflop_ds.data.processors.square import check_side, square_frames
from dflop_ds.errors import ConfigError
from dflop_ds.families import MediaItem, MediaKind
from dflop_ds.families.llava_onevision import LlavaOnevisionRule


class LlavaOnevisionProcessor:
    """Rows are tiles or frames of shape (3, tile_px, tile_px).

    Parameters
    ----------
    image_processor : LlavaOnevisionImageProcessorPil
    rule : LlavaOnevisionRule

    Raises
    ------
    ConfigError
        If they do not belong together.
    """

    def __init__(self, image_processor: LlavaOnevisionImageProcessorPil, rule: LlavaOnevisionRule) -> None:
        check_side(image_processor, rule.tile_px)
        if tuple(tuple(size) for size in image_processor.image_grid_pinpoints) != rule.resolutions_px:
            raise ConfigError(
                "image_grid_pinpoints of preprocessor_config.json must equal those of config.json, "
                "found others; the model cannot arrange the tiles otherwise."
            )
        self.image_processor = image_processor
        self.row_shape = (3, rule.tile_px, rule.tile_px)

    def rows(self, items: Sequence[MediaItem], media: Sequence[Any]) -> list[torch.Tensor]:
        """See :class:`dflop_ds.data.processor.MediaProcessor`."""
        images = [one for item, one in zip(items, media, strict=True) if item.kind is not MediaKind.CLIP]
        tiles = iter(self._image_tiles(images))
        return [
            square_frames(self.image_processor, one, self.row_shape[1])
            if item.kind is MediaKind.CLIP
            else next(tiles)
            for item, one in zip(items, media, strict=True)
        ]

    def _image_tiles(self, images: list[Any]) -> list[torch.Tensor]:
        """Tiles of each image; images that share a sample are given together, as they are not cut then."""
        if not images:
            return []
        values = self.image_processor([images], return_tensors="pt")["pixel_values"]
        return list(cast(torch.Tensor, values).to(torch.float32))


def open_processor(model_dir: Path, rule: LlavaOnevisionRule) -> LlavaOnevisionProcessor:
    """Processor of a local model directory.

    Raises
    ------
    OSError, ValueError, ConfigError
        If its settings are missing, damaged or of another model.
    """
    image_processor = LlavaOnevisionImageProcessorPil.from_pretrained(model_dir, local_files_only=True)
    return LlavaOnevisionProcessor(image_processor, rule)
