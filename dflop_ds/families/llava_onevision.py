"""LLaVA-OneVision: how many tiles and LLM tokens an image or a clip becomes.

A lone image is resized into the grid of tiles that keeps most of its pixels, padded to fill the
grid, and cut; a base view of the whole image goes first. After the encoder the padding is removed
again, the patch map is shrunk when it is larger than the configured number of tiles, and each of
its rows gets a newline token. Images that come in company are one square tile each. The frames of
a clip are halved in both directions and share one newline.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families.base import (
    MediaItem,
    MediaKind,
    MediaRule,
    Modality,
    Placeholder,
    check_image_size,
    check_num_frames,
)
from dflop_ds.families.registry import Family

_DEFAULT_TILE_PX = 384
_DEFAULT_PATCH_PX = 14
_DEFAULT_GRID_SIDE = 6
_DEFAULT_ASPECT_RATIO = "anyres_max_9"
_DEFAULT_IMAGE_TOKEN_ID = 151646
_DEFAULT_VIDEO_TOKEN_ID = 151647
_SHRINK_ABOVE = 1.1


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How the tiles of a lone image are put together after the encoder.

    Attributes
    ----------
    tile_rows, tile_columns : int
        Grid of tiles, without the base view.
    crop_top, crop_left : int
        Patches of padding above and left of the image.
    kept_rows, kept_columns : int
        Patch map without padding.
    out_rows, out_columns : int
        Patch map that reaches the LLM, newlines not counted; smaller than kept where it is shrunk.
    """

    tile_rows: int
    tile_columns: int
    crop_top: int
    crop_left: int
    kept_rows: int
    kept_columns: int
    out_rows: int
    out_columns: int


@dataclasses.dataclass(frozen=True)
class LlavaOnevisionRule(MediaRule):
    """Media sizes of a LLaVA-OneVision model.

    Attributes
    ----------
    tile_px : int
        Side of the encoder input, in pixels.
    patch_px : int
        Side of an encoder patch, in pixels.
    resolutions_px : tuple of (int, int)
        Allowed grids as (height, width), each a multiple of ``tile_px``.
    max_tiles : int
        Patch maps of more tiles than this are shrunk to it.
    image_token_id, video_token_id : int
        Placeholder tokens.
    """

    tile_px: int
    patch_px: int
    resolutions_px: tuple[tuple[int, int], ...]
    max_tiles: int
    image_token_id: int
    video_token_id: int

    def __post_init__(self) -> None:
        if not 1 <= self.patch_px <= self.tile_px:
            raise ConfigError(
                "vision_config must have 1 <= patch_size <= image_size, found "
                f"patch_size {self.patch_px}, image_size {self.tile_px}; correct the model's config.json."
            )
        if not self.resolutions_px:
            raise ConfigError(
                "image_grid_pinpoints must name at least one size, found none; correct config.json."
            )
        for size in self.resolutions_px:
            if min(size) < self.tile_px or size[0] % self.tile_px or size[1] % self.tile_px:
                raise ConfigError(
                    f"image_grid_pinpoints must be multiples of image_size {self.tile_px}, found "
                    f"{list(size)}; the model cannot arrange its tiles otherwise: correct config.json."
                )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlavaOnevisionRule:
        """Read the rule from the content of a ``config.json``.

        Parameters
        ----------
        config : dict
            As saved by ``LlavaOnevisionConfig``; missing keys take its defaults.

        Raises
        ------
        ConfigError
            If a value is one that the rule does not describe.
        """
        vision = config.get("vision_config") or {}
        encoder = vision.get("model_type", "siglip_vision_model")
        strategy = config.get("vision_feature_select_strategy", "full")
        if encoder != "siglip_vision_model" or strategy != "full":
            raise ConfigError(
                "a LLaVA-OneVision model must use a siglip_vision_model encoder with "
                f"vision_feature_select_strategy 'full', found {encoder!r} "
                f"with {strategy!r}; use such a checkpoint."
            )
        tile_px = int(vision.get("image_size", _DEFAULT_TILE_PX))
        return cls(
            tile_px=tile_px,
            patch_px=int(vision.get("patch_size", _DEFAULT_PATCH_PX)),
            resolutions_px=_resolutions(config.get("image_grid_pinpoints")),
            max_tiles=_max_tiles(config.get("vision_aspect_ratio", _DEFAULT_ASPECT_RATIO)),
            image_token_id=_token_id(config, "image", _DEFAULT_IMAGE_TOKEN_ID),
            video_token_id=_token_id(config, "video", _DEFAULT_VIDEO_TOKEN_ID),
        )

    @property
    def patches_per_side(self) -> int:
        """Patches along one side of a tile."""
        return self.tile_px // self.patch_px

    @property
    def placeholders(self) -> Mapping[Modality, Placeholder]:
        """Placeholder tokens, with nothing around them."""
        return {
            Modality.IMAGE: Placeholder("<image>", self.image_token_id),
            Modality.VIDEO: Placeholder("<video>", self.video_token_id),
        }

    def image(self, height: int, width: int, num_images: int) -> MediaItem:
        """One image; ``extent`` is (height, width).

        Raises
        ------
        DataError
            If a size is below one pixel, or the patch map would be shrunk to nothing.
        """
        check_image_size(height, width)
        if num_images < 1:
            raise DataError(f"num_images must be at least 1, found {num_images}; count this image as well.")
        patches = self.patches_per_side**2
        if num_images > 1:
            return MediaItem(MediaKind.WHOLE_IMAGE, 1, 1, patches + 1, (height, width))
        tiling = self.tiling(height, width)
        num_tiles = 1 + tiling.tile_rows * tiling.tile_columns
        num_tokens = patches + tiling.out_rows * (tiling.out_columns + 1)
        return MediaItem(MediaKind.TILED_IMAGE, num_tiles, num_tiles, num_tokens, (height, width))

    def clip(
        self, num_frames: int, height: int = 0, width: int = 0, frame_interval_s: float = 0.0
    ) -> MediaItem:
        """One clip; ``extent`` is (height, width), which does not matter here.

        Raises
        ------
        DataError
            If there is no frame.
        """
        check_num_frames(num_frames)
        pooled_side = -(-self.patches_per_side // 2)
        num_tokens = num_frames * pooled_side**2 + 1
        return MediaItem(MediaKind.CLIP, num_frames, num_frames, num_tokens, (height, width))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Size in pixels that keeps most of the image, the smallest such; the first named wins a tie."""

        def merit(size: tuple[int, int]) -> tuple[int, int]:
            grid_height, grid_width = size
            scale = min(grid_width / width, grid_height / height)
            kept_px = min(int(width * scale) * int(height * scale), width * height)
            return kept_px, -grid_height * grid_width

        return max(self.resolutions_px, key=merit)

    def tiling(self, height: int, width: int) -> Tiling:
        """Tiles and patch map of a lone image.

        Of a very narrow image nothing but the base view (and newlines) may be left, which the
        model accepts.

        Raises
        ------
        DataError
            If the patch map would be shrunk to nothing, which the model cannot do.
        """
        side = self.patches_per_side
        grid_height, grid_width = self._grid(height, width)
        tile_rows, tile_columns = grid_height // self.tile_px, grid_width // self.tile_px
        rows, columns = side * tile_rows, side * tile_columns
        crop_top = crop_left = 0
        if width / height > columns / rows:
            crop_top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            crop_left = (columns - int(round(width * (rows / height), 7))) // 2
        kept_rows, kept_columns = rows - 2 * crop_top, columns - 2 * crop_left
        ratio = math.sqrt(kept_rows * kept_columns / (self.max_tiles * side**2))
        out_rows, out_columns = kept_rows, kept_columns
        if ratio > _SHRINK_ABOVE:
            out_rows, out_columns = int(kept_rows // ratio), int(kept_columns // ratio)
            if min(out_rows, out_columns) < 1:
                raise DataError(
                    f"an image must keep a patch in both directions, found {height} x {width} px shrunk to "
                    f"{out_rows} x {out_columns} patches; crop it to a less extreme aspect ratio or drop it."
                )
        return Tiling(
            tile_rows, tile_columns, crop_top, crop_left, kept_rows, kept_columns, out_rows, out_columns
        )


def _resolutions(pinpoints: Sequence[Sequence[int]] | None) -> tuple[tuple[int, int], ...]:
    if pinpoints is None:
        sides = [_DEFAULT_TILE_PX * i for i in range(1, _DEFAULT_GRID_SIDE + 1)]
        return tuple((height, width) for height in sides for width in sides)
    try:
        return tuple((int(height), int(width)) for height, width in pinpoints)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "image_grid_pinpoints must be a list "
            f"of [height, width], found {pinpoints!r}; correct config.json."
        ) from error


def _max_tiles(aspect_ratio: str) -> int:
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", str(aspect_ratio))
    if match is None:
        raise ConfigError(
            f"vision_aspect_ratio must be 'anyres_max_<tiles>', found {aspect_ratio!r}; correct config.json."
        )
    return int(match.group(1))


def _token_id(config: Mapping[str, Any], kind: str, default: int) -> int:
    for key in (f"{kind}_token_index", f"{kind}_token_id"):
        if config.get(key) is not None:
            return int(config[key])
    return default


FAMILY = Family(
    model_type="llava_onevision",
    rule=lambda config, settings: LlavaOnevisionRule.from_config(config),
    processor="dflop_ds.data.processors.llava_onevision:open_processor",
    layers="dflop_ds.models.llava_onevision:pipeline_layers",
    published_names=(
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.vision_tower.", "model.vision_tower.vision_model."),
        ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.image_newline", "image_newline"),
        ("lm_head.", "language_model.lm_head."),
    ),
)
