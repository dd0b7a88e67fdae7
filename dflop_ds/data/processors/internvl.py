"""InternVL: tiles of images with their thumbnails, and frames of clips, as square encoder inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GotOcr2ImageProcessorPil

from dflop_ds.data.processors.square import check_side, square_frames
from dflop_ds.families import MediaItem, MediaKind
from dflop_ds.families.internvl import InternVLRule


class InternVLProcessor:
    """Rows are tiles or frames of shape (3, tile_px, tile_px).

    Parameters
    ----------
    image_processor : GotOcr2ImageProcessorPil
        The one that ``transformers`` uses for this family.
    rule : InternVLRule

    Raises
    ------
    ConfigError
        If they do not belong together.
    """

    def __init__(self, image_processor: GotOcr2ImageProcessorPil, rule: InternVLRule) -> None:
        check_side(image_processor, rule.tile_px)
        self.image_processor = image_processor
        self.row_shape = (3, rule.tile_px, rule.tile_px)

    def rows(self, items: Sequence[MediaItem], media: Sequence[Any]) -> list[torch.Tensor]:
        """See :class:`dflop_ds.data.processor.MediaProcessor`."""
        return [
            square_frames(self.image_processor, one, self.row_shape[1])
            if item.kind is MediaKind.CLIP
            else self._tiles(one)
            for item, one in zip(items, media, strict=True)
        ]

    def _tiles(self, image: Any) -> torch.Tensor:
        values = self.image_processor(image, crop_to_patches=True, return_tensors="pt")["pixel_values"]
        return cast(torch.Tensor, values).to(torch.float32)


def open_processor(model_dir: Path, rule: InternVLRule) -> InternVLProcessor:
    """Processor of a local model directory.

    Raises
    ------
    OSError, ValueError, ConfigError
        If its settings are missing, damaged or of another model.
    """
    return InternVLProcessor(GotOcr2ImageProcessorPil.from_pretrained(model_dir, local_files_only=True), rule)
