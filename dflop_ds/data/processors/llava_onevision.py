"""LLaVA-OneVision: tiles of images and frames of clips as square encoder inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import LlavaOnevisionImageProcessorPil
from transformers.image_utils import SizeDict

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
        size = image_processor.size
        if (size.get("height"), size.get("width")) != (rule.tile_px, rule.tile_px):
            raise ConfigError(
                f"the image processor must resize to the encoder's {rule.tile_px} x {rule.tile_px} px, "
                f"found {size}; "
                "use the preprocessor_config.json that belongs to the model."
            )
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
            self._frames(one) if item.kind is MediaKind.CLIP else next(tiles)
            for item, one in zip(items, media, strict=True)
        ]

    def _image_tiles(self, images: list[Any]) -> list[torch.Tensor]:
        """Tiles of each image; images that share a sample are given together, as they are not cut then."""
        if not images:
            return []
        values = self.image_processor([images], return_tensors="pt")["pixel_values"]
        return list(cast(torch.Tensor, values).to(torch.float32))

    def _frames(self, frames: Sequence[np.ndarray]) -> torch.Tensor:
        """Frames squeezed into the encoder's square, as the family's video processor does."""
        processor = self.image_processor
        size = SizeDict(height=self.row_shape[1], width=self.row_shape[2])
        rows = []
        for frame in frames:
            pixels = processor.resize(np.moveaxis(frame, -1, 0), size=size, resample=processor.resample)
            pixels = processor.rescale(pixels, processor.rescale_factor)
            rows.append(processor.normalize(pixels, processor.image_mean, processor.image_std))
        return torch.from_numpy(np.stack(rows)).to(torch.float32)


def open_processor(model_dir: Path, rule: LlavaOnevisionRule) -> LlavaOnevisionProcessor:
    """Processor of a local model directory.

    Raises
    ------
    OSError, ValueError, ConfigError
        If its settings are missing, damaged or of another model.
    """
    image_processor = LlavaOnevisionImageProcessorPil.from_pretrained(model_dir, local_files_only=True)
    return LlavaOnevisionProcessor(image_processor, rule)
