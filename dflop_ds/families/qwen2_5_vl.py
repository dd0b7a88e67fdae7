"""Qwen2.5-VL: how many patches and LLM tokens an image or a clip becomes.

Images and frames keep their aspect ratio: both sides are brought to multiples of the side of a merged
patch, within a budget of pixels. The encoder takes every patch as one input, so its sequence length
varies with the image. Two frames of a clip form one temporal patch; the last frame of an odd number
is repeated. After the encoder ``merge x merge`` patches become one LLM token.

Most encoder blocks attend inside windows, the others inside whole frames, and never across frames.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dflop_ds.errors import ConfigError, DataError

MAX_ASPECT_RATIO = 200
"""The processor refuses images that are longer than this, relative to their short side."""

_CAP_SHARE = 0.9
_CAP_FLOOR = 1.05


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


_IMAGE_BUDGET = PixelBudget(56 * 56, 28 * 28 * 1280)
_CLIP_BUDGET = PixelBudget(128 * 28 * 28, 28 * 28 * 768)


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
    if min(height, width) < 1:
        raise DataError(
            f"an image must be at least 1 x 1 pixel, found {height} x {width}; replace or drop it."
        )
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


@dataclasses.dataclass(frozen=True)
class Qwen25VlRule:
    """Media sizes of a Qwen2.5-VL model.

    Attributes
    ----------
    patch_px : int
        Side of a patch, in pixels.
    frames_per_patch : int
        Frames of a clip that form one temporal patch.
    merge : int
        ``merge x merge`` patches become one LLM token.
    window_px : int
        Side of an attention window of the encoder, in pixels.
    tokens_per_second : int
        Temporal positions of the LLM per second of a clip.
    image_budget, clip_budget : PixelBudget
        Of an image, and of one frame of a clip.
    max_clip_tokens : int, optional
        Where set, the frames of a clip share a budget of 90 % of this many merged patches.
    image_token_id, video_token_id : int
        Placeholder tokens.
    """

    patch_px: int
    frames_per_patch: int
    merge: int
    window_px: int
    tokens_per_second: int
    image_budget: PixelBudget
    clip_budget: PixelBudget
    max_clip_tokens: int | None
    image_token_id: int
    video_token_id: int

    def __post_init__(self) -> None:
        for name in ("patch_px", "frames_per_patch", "merge", "tokens_per_second"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name} of the vision encoder must be a whole number of at least 1, found {value!r}; "
                    "correct vision_config in the model's config.json."
                )
        if self.window_px < self.patch_px * self.merge:
            raise ConfigError(
                "window_size must hold a merged patch, found "
                f"{self.window_px} px for {self.merge} patches of {self.patch_px} px; correct config.json."
            )

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        image_processor: Mapping[str, Any] | None = None,
        video_processor: Mapping[str, Any] | None = None,
    ) -> Qwen25VlRule:
        """Read the rule from the content of the files of a model directory.

        Parameters
        ----------
        config : dict
            ``config.json`` as saved by ``Qwen2_5_VLConfig``; missing keys take its defaults.
        image_processor : dict, optional
            ``preprocessor_config.json``: the pixel budget, and patches that must be those of the model.
        video_processor : dict, optional
            ``video_preprocessor_config.json``, the same for clips.

        Raises
        ------
        ConfigError
            If a value is one that the rule does not describe, or the files contradict one another.
        """
        vision = config.get("vision_config") or {}
        images, clips = image_processor or {}, video_processor or {}
        rule = cls(
            patch_px=vision.get("patch_size", 14),
            frames_per_patch=vision.get("temporal_patch_size", 2),
            merge=vision.get("spatial_merge_size", 2),
            window_px=int(vision.get("window_size", 112)),
            tokens_per_second=vision.get("tokens_per_second", 4),
            image_budget=_budget(images, _IMAGE_BUDGET),
            clip_budget=_budget(clips, _CLIP_BUDGET),
            max_clip_tokens=int(clips.get("max_video_tokens") or 128000)
            if clips.get("cap_pixels_per_frame")
            else None,
            image_token_id=int(config.get("image_token_id", 151655)),
            video_token_id=int(config.get("video_token_id", 151656)),
        )
        for name, processor in (("preprocessor_config", images), ("video_preprocessor_config", clips)):
            rule._check_processor(name, processor)
        return rule

    def _check_processor(self, name: str, processor: Mapping[str, Any]) -> None:
        wanted = {
            "patch_size": self.patch_px,
            "temporal_patch_size": self.frames_per_patch,
            "merge_size": self.merge,
        }
        for key, value in wanted.items():
            if processor.get(key, value) != value:
                raise ConfigError(
                    f"{key} of {name}.json must be {value} as in the model's config.json, found "
                    f"{processor[key]!r}; use the file that belongs to the model."
                )
        if processor.get("do_resize", True) is not True:
            raise ConfigError(
                f"do_resize of {name}.json must be true, found {processor['do_resize']!r}; "
                "images of any size must be brought to whole patches."
            )

    @property
    def factor_px(self) -> int:
        """Side of a merged patch, in pixels."""
        return self.patch_px * self.merge

    @property
    def values_per_patch(self) -> int:
        """Pixel values of one encoder input: three channels, all frames of a temporal patch."""
        return 3 * self.frames_per_patch * self.patch_px * self.patch_px

    def image_grid(self, height: int, width: int) -> PatchGrid:
        """Patches of an image of ``height x width`` pixels.

        Raises
        ------
        DataError
            If the processor refuses the size.
        """
        return self._grid(1, height, width, self.image_budget)

    def clip_grid(self, num_frames: int, height: int, width: int) -> PatchGrid:
        """Patches of a clip of which ``num_frames`` frames of ``height x width`` pixels are used.

        Raises
        ------
        DataError
            If there is no frame or the processor refuses the size.
        """
        if num_frames < 1:
            raise DataError(f"a clip must have at least 1 frame, found {num_frames}; replace or drop it.")
        temporal = -(-num_frames // self.frames_per_patch)
        return self._grid(temporal, height, width, self.frame_budget(num_frames))

    def frame_budget(self, num_frames: int) -> PixelBudget:
        """Pixels of each of the ``num_frames`` frames of a clip."""
        budget = self.clip_budget
        if self.max_clip_tokens is None:
            return budget
        total_px = int(self.max_clip_tokens * self.factor_px * self.factor_px * _CAP_SHARE)
        share_px = min(budget.max_px, total_px * self.frames_per_patch // num_frames)
        return PixelBudget(budget.min_px, max(share_px, int(budget.min_px * _CAP_FLOOR)))

    def num_tokens(self, grid: PatchGrid) -> int:
        """LLM tokens of a grid of patches."""
        return grid.num_patches // self.merge**2

    def window_lengths(self, grid: PatchGrid) -> list[int]:
        """Patches of every attention window, in the order of the encoder's sequence."""
        rows, columns = self._window_sides(grid.rows), self._window_sides(grid.columns)
        of_frame = [height * width * self.merge**2 for height in rows for width in columns]
        return of_frame * grid.frames

    def sum_squared_windows(self, grid: PatchGrid) -> int:
        """Sum over the windows of patches squared: the work of attention inside windows."""
        rows, columns = self._window_sides(grid.rows), self._window_sides(grid.columns)
        of_frame = sum(side * side for side in rows) * sum(side * side for side in columns)
        return int(grid.frames * of_frame * self.merge**4)

    def num_windows(self, grid: PatchGrid) -> int:
        """Attention windows of a grid."""
        return grid.frames * len(self._window_sides(grid.rows)) * len(self._window_sides(grid.columns))

    def seconds_per_patch(self, num_frames: int, num_frames_total: int, fps: float) -> float:
        """Seconds from one temporal patch of a clip to the next.

        Parameters
        ----------
        num_frames, num_frames_total : int
            Frames that are used, of those in the clip.
        fps : float
            Rate of the clip; 0 when unknown, which the processor takes as 24 used frames a second.
        """
        used_fps = num_frames / num_frames_total * fps if fps > 0 else 24.0
        return self.frames_per_patch / used_fps

    def _grid(self, frames: int, height: int, width: int, budget: PixelBudget) -> PatchGrid:
        height, width = smart_resize(height, width, self.factor_px, budget)
        return PatchGrid(frames, height // self.patch_px, width // self.patch_px)

    def _window_sides(self, num_patches: int) -> list[int]:
        """Sides of the windows along one direction, in merged patches."""
        side = self.window_px // self.merge // self.patch_px
        full, rest = divmod(num_patches // self.merge, side)
        return [side] * full + ([rest] if rest else [])


def _budget(processor: Mapping[str, Any], default: PixelBudget) -> PixelBudget:
    """Pixel budget of a processor; ``min_pixels`` and ``max_pixels`` of older files go before ``size``."""
    size = processor.get("size") or {}
    lowest = processor.get("min_pixels") or size.get("shortest_edge") or default.min_px
    highest = processor.get("max_pixels") or size.get("longest_edge") or default.max_px
    return PixelBudget(int(lowest), int(highest))
