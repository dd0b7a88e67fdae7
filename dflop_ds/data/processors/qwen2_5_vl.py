"""Qwen2.5-VL: images and frames at their own resolution, cut into flat patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.image_utils import SizeDict

from dflop_ds.families import MediaItem, MediaKind
from dflop_ds.families.patches import PixelBudget
from dflop_ds.families.qwen2_5_vl import Qwen25VlRule


class Qwen25VlProcessor:
    """Rows are patches of shape (channels x frames per patch x patch side x patch side,).

    Parameters
    ----------
    image_processor : Qwen2VLImageProcessorPil
        Its resampling, scale, mean and standard deviation are used for clips as well.
    rule : Qwen25VlRule
    """

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, rule: Qwen25VlRule) -> None:
        self.image_processor = image_processor
        self.rule = rule
        self.row_shape = (rule.values_per_patch,)

    def rows(self, items: Sequence[MediaItem], media: Sequence[Any]) -> list[torch.Tensor]:
        """See :class:`dflop_ds.data.processor.MediaProcessor`."""
        return [
            torch.from_numpy(self._clip(one) if item.kind is MediaKind.CLIP else self._image(one))
            for item, one in zip(items, media, strict=True)
        ]

    def _image(self, image: Any) -> npt.NDArray[np.float32]:
        budget = self.rule.image_budget
        found = self.image_processor(image, size=_size(budget))
        return np.asarray(found["pixel_values"], dtype=np.float32)

    def _clip(self, frames: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.float32]:
        """Every frame is treated as an image is, within the budget of the clip; an odd one is repeated."""
        size = SizeDict(**_size(self.rule.frame_budget(len(frames))))
        resized = [self._frame(frame, size) for frame in frames]
        resized += [resized[-1]] * (-len(resized) % self.rule.frames_per_patch)
        return cut_patches(np.stack(resized), self.rule)

    def _frame(self, frame: npt.NDArray[np.uint8], size: SizeDict) -> npt.NDArray[np.float32]:
        """Channels first, resized and normalised."""
        processor = self.image_processor
        factor = self.rule.factor_px
        pixels = processor.resize(
            np.moveaxis(frame, -1, 0), size=size, resample=processor.resample, factor=factor
        )
        if processor.do_rescale:
            pixels = processor.rescale(pixels, processor.rescale_factor)
        if processor.do_normalize:
            pixels = processor.normalize(pixels, processor.image_mean, processor.image_std)
        return np.asarray(pixels, dtype=np.float32)


def cut_patches(frames: npt.NDArray[np.float32], rule: Qwen25VlRule) -> npt.NDArray[np.float32]:
    """Patches in the encoder's order: frame by frame, in blocks that become one token.

    Parameters
    ----------
    frames : ndarray, shape (num_frames, channels, height, width)
        A multiple of ``rule.frames_per_patch`` frames, of whole merged patches.
    rule : Qwen25VlRule

    Returns
    -------
    ndarray, shape (num_patches, rule.values_per_patch)
        Values of a patch by channel, frame, row and column.
    """
    _, channels, height, width = frames.shape
    side, merge, depth = rule.patch_px, rule.merge, rule.frames_per_patch
    blocks = frames.reshape(
        -1, depth, channels, height // side // merge, merge, side, width // side // merge, merge, side
    )
    return blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, rule.values_per_patch)


def _size(budget: PixelBudget) -> dict[str, int]:
    return {"shortest_edge": budget.min_px, "longest_edge": budget.max_px}


def open_processor(model_dir: Path, rule: Qwen25VlRule) -> Qwen25VlProcessor:
    """Processor of a local model directory.

    Raises
    ------
    OSError, ValueError
        If its settings are missing or damaged.
    """
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(model_dir, local_files_only=True)
    return Qwen25VlProcessor(image_processor, rule)
