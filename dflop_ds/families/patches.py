"""Images at their own resolution: resizing within a budget of pixels, and grids of patches."""

from __future__ import annotations

import dataclasses
import math

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families.base import check_image_size

MAX_ASPECT_RATIO = 200
"""The processor refuses images that are longer than this, relative to their short side."""


@dataclasses.dataclass(frozen=True, slots=True)
class PatchGrid:
    """Patches of one image or clip.

    Attributes
    ----------
    frames : int
        Temporal patches; 1 for an image.
    rows, columns : int
        Patches of one frame, both multiples of the merge size.
    """

    frames: int
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        """Patches in all."""
        return self.frames * self.rows * self.columns

    @property
    def sum_squared_frames(self) -> int:
        """Sum over the frames of patches squared: the work of attention inside frames."""
        return self.frames * (self.rows * self.columns) ** 2


@dataclasses.dataclass(frozen=True, slots=True)
class PixelBudget:
    """Pixels that an image, or a frame of a clip, may have after resizing.

    Attributes
    ----------
    min_px, max_px : int
        Area in pixels.
    """

    min_px: int
    max_px: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_px <= self.max_px:
            raise ConfigError(
                "a pixel budget must have 1 <= min_pixels <= max_pixels, found "
                f"{self.min_px} and {self.max_px}; correct the size in preprocessor_config.json."
            )


def smart_resize(height: int, width: int, factor: int, budget: PixelBudget) -> tuple[int, int]:
    """Height and width in pixels after resizing, as the processor of the model computes them.

    Parameters
    ----------
    height, width : int
        Size in pixels.
    factor : int
        Side of a merged patch, in pixels; both results are multiples of it.
    budget : PixelBudget
        Of the result. An extremely long image may exceed ``max_px``, as a side is at least ``factor``.

    Raises
    ------
    DataError
        If a size is below one pixel or the aspect ratio is above 200, which the processor refuses.
    """
    check_image_size(height, width)
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise DataError(
            f"an image must have an aspect ratio of at most {MAX_ASPECT_RATIO}, found {ratio:g} "
            f"({height} x {width} pixels); crop it or drop the sample."
        )
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor * factor
    if area > budget.max_px:
        shrink = math.sqrt(height * width / budget.max_px)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif area < budget.min_px:
        grow = math.sqrt(budget.min_px / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor
