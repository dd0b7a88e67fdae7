"""Qwen2.5-VL: how many patches and LLM tokens an image or a clip becomes.

Images and frames keep their aspect ratio: both sides are brought to multiples of the side of a merged
patch, within a budget of pixels. The encoder takes every patch as one input, so its sequence length
varies with the image. Two frames of a clip form one temporal patch; the last frame of an odd number
is repeated. After the encoder ``merge x merge`` patches become one LLM token.

Most encoder blocks attend inside windows, the others inside whole frames, and never across frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dflop_ds.errors import ConfigError
from dflop_ds.families.base import (
    MediaItem,
    MediaKind,
    MediaRule,
    Modality,
    Placeholder,
    check_num_frames,
)
from dflop_ds.families.mrope import TokenGrid
from dflop_ds.families.patches import PatchGrid, PixelBudget, smart_resize
from dflop_ds.families.registry import Family, image_settings
from dflop_ds.flops import ModelDims

_CAP_SHARE = 0.9
_CAP_FLOOR = 1.05
_CONTEXT_TOKENS = 128_000
_UNKNOWN_FPS = 24.0

_IMAGE_BUDGET = PixelBudget(56 * 56, 28 * 28 * 1280)
_CLIP_BUDGET = PixelBudget(128 * 28 * 28, 28 * 28 * 768)


@dataclasses.dataclass(frozen=True)
class Qwen25VlRule(MediaRule):
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

    needs_upright_size: ClassVar[bool] = True

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
        cls, config: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Qwen25VlRule:
        """Read the rule from the content of the files of a model directory.

        Parameters
        ----------
        config : dict
            ``config.json`` as saved by ``Qwen2_5_VLConfig``; missing keys take its defaults.
        settings : dict of str to dict, optional
            Processor files by name without ``.json``, see :func:`dflop_ds.data.processor.read_settings`:
            pixel budgets, and patches that must be those of the model. Which file counts is decided as
            ``transformers`` does.

        Raises
        ------
        ConfigError
            If a value is one that the rule does not describe, or the files contradict one another.
        """
        vision = config.get("vision_config") or {}
        images, clips = processor_settings(settings or {})
        rule = cls(
            patch_px=vision.get("patch_size", 14),
            frames_per_patch=vision.get("temporal_patch_size", 2),
            merge=vision.get("spatial_merge_size", 2),
            window_px=int(vision.get("window_size", 112)),
            tokens_per_second=vision.get("tokens_per_second", 4),
            image_budget=_budget(images, _IMAGE_BUDGET),
            clip_budget=_budget(clips, _CLIP_BUDGET),
            max_clip_tokens=int(clips.get("max_video_tokens") or _CONTEXT_TOKENS)
            if clips.get("cap_pixels_per_frame")
            else None,
            image_token_id=int(config.get("image_token_id", 151655)),
            video_token_id=int(config.get("video_token_id", 151656)),
        )
        for what, processor in (("images", images), ("clips", clips)):
            rule._check_processor(what, processor)
        return rule

    def _check_processor(self, what: str, processor: Mapping[str, Any]) -> None:
        wanted = {
            "patch_size": self.patch_px,
            "temporal_patch_size": self.frames_per_patch,
            "merge_size": self.merge,
        }
        for key, value in wanted.items():
            if processor.get(key, value) != value:
                raise ConfigError(
                    f"{key} of the processor of {what} must be {value} as in the model's config.json, "
                    f"found {processor[key]!r}; use the files that belong to the model."
                )
        if processor.get("do_resize", True) is not True:
            raise ConfigError(
                f"do_resize of the processor of {what} must be true, found {processor['do_resize']!r}; "
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

    @property
    def placeholders(self) -> Mapping[Modality, Placeholder]:
        """Pads of images and clips, each run between the tokens that begin and end a medium."""
        around = ("<|vision_start|>", "<|vision_end|>")
        return {
            Modality.IMAGE: Placeholder("<|image_pad|>", self.image_token_id, *around),
            Modality.VIDEO: Placeholder("<|video_pad|>", self.video_token_id, *around),
        }

    def image(self, height: int, width: int, num_images: int) -> MediaItem:
        """See :class:`dflop_ds.families.base.MediaRule`; other images of the sample make no difference.

        Raises
        ------
        DataError
            If the processor refuses the size.
        """
        return self._item(MediaKind.WHOLE_IMAGE, self.image_grid(height, width), 1.0)

    def clip(
        self, num_frames: int, height: int = 0, width: int = 0, frame_interval_s: float = 0.0
    ) -> MediaItem:
        """See :class:`dflop_ds.families.base.MediaRule`; the processor takes an unknown rate as 24 a second.

        Raises
        ------
        DataError
            If there is no frame or the processor refuses the size.
        """
        interval_s = frame_interval_s or 1.0 / _UNKNOWN_FPS
        # The model multiplies in single precision.
        interval = np.float32(self.tokens_per_second) * np.float32(self.frames_per_patch * interval_s)
        return self._item(MediaKind.CLIP, self.clip_grid(num_frames, height, width), float(interval))

    def sizes(self, item: MediaItem) -> Mapping[str, float]:
        """Patches and the work of attention; an image is one tile, a clip as many frames as are encoded."""
        grid = self.patch_grid(item)
        is_clip = item.kind is MediaKind.CLIP
        return {
            "num_frames" if is_clip else "num_tiles": grid.frames * self.frames_per_patch if is_clip else 1,
            "num_patches": grid.num_patches,
            "sum_squared_windows": self.sum_squared_windows(grid),
            "sum_squared_frames": grid.sum_squared_frames,
        }

    def patch_grid(self, item: MediaItem) -> PatchGrid:
        """Patches of an item of this rule."""
        return PatchGrid(*item.extent[:3])

    def token_grid(self, item: MediaItem) -> TokenGrid:
        """LLM tokens of an item of this rule."""
        frames, rows, columns, interval_bits = item.extent
        interval = float(np.int32(interval_bits).view(np.float32))
        return TokenGrid(frames, rows // self.merge, columns // self.merge, interval)

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
        check_num_frames(num_frames)
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

    def _item(self, kind: MediaKind, grid: PatchGrid, interval: float) -> MediaItem:
        """Item whose extent is the grid and the bits of the interval as a single precision number."""
        bits = int(np.float32(interval).view(np.int32))
        extent = (grid.frames, grid.rows, grid.columns, bits)
        num_tokens = grid.num_patches // self.merge**2
        return MediaItem(kind, grid.num_patches, grid.num_patches, num_tokens, extent)

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


def processor_settings(
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings for images and for clips, from the files of a model directory.

    See :func:`~dflop_ds.families.registry.image_settings`; a directory without settings for clips has
    those of images for them.
    """
    of_images = settings.get("preprocessor_config", {})
    inside = settings.get("processor_config", {}).get("video_processor")
    clips = inside or settings.get("video_preprocessor_config") or of_images
    return image_settings(settings), clips


FAMILY = Family(
    model_type="qwen2_5_vl",
    rule=Qwen25VlRule.from_config,
    processor="dflop_ds.data.processors.qwen2_5_vl:open_processor",
    layers="dflop_ds.models.qwen2_5_vl:pipeline_layers",
    dims=ModelDims.from_native_config,
    published_names=(("model.visual.", "visual."), ("model.language_model.", "model.")),
)
"""Registry entry."""
