"""InternVL: how many tiles and LLM tokens an image or a clip becomes.

Every image is squeezed into the grid of tiles whose aspect ratio is nearest to its own; of equal ones
into the largest that the image fills at least half. A thumbnail of the whole image follows, unless one
tile suffices. A frame of a clip is one tile. After the encoder pixel shuffle turns ``factor x factor``
patches into one LLM token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from dflop_ds.errors import ConfigError
from dflop_ds.families.base import (
    MediaItem,
    MediaKind,
    MediaRule,
    Modality,
    Placeholder,
    check_image_size,
    check_num_frames,
)
from dflop_ds.families.registry import Family, image_settings

CONTEXT_TOKEN = "<IMG_CONTEXT>"
IMAGE_START, IMAGE_END = "<img>", "</img>"

_DEFAULT_TILE_PX = 448
_DEFAULT_PATCH_PX = 14
_DEFAULT_RATIO = 0.5
_DEFAULT_MAX_TILES = 12
_DEFAULT_IMAGE_TOKEN_ID = 151667


@dataclasses.dataclass(frozen=True)
class InternVLRule(MediaRule):
    """Media sizes of an InternVL model.

    Attributes
    ----------
    tile_px, patch_px : int
        Side of the encoder input and of an encoder patch, in pixels.
    factor : int
        Side of the square of patches that becomes one LLM token.
    min_tiles, max_tiles : int
        Tiles that an image is cut into, the thumbnail not counted.
    image_token_id : int
        Placeholder token of images and of frames.
    """

    tile_px: int
    patch_px: int
    factor: int
    min_tiles: int
    max_tiles: int
    image_token_id: int

    def __post_init__(self) -> None:
        if not 1 <= self.patch_px <= self.tile_px:
            raise ConfigError(
                "vision_config must have 1 <= patch_size <= image_size, found "
                f"patch_size {self.patch_px}, image_size {self.tile_px}; correct the model's config.json."
            )
        if self.factor < 1 or self.patches_per_side % self.factor:
            raise ConfigError(
                f"downsample_ratio must divide the {self.patches_per_side} patches of a tile's side, found "
                f"1/{self.factor}; correct the model's config.json."
            )
        if not 1 <= self.min_tiles <= self.max_tiles:
            raise ConfigError(
                "preprocessor_config.json must have 1 <= min_patches <= max_patches, found "
                f"{self.min_tiles} and {self.max_tiles}; correct it."
            )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> InternVLRule:
        """Read the rule from the content of the files of a model directory.

        Parameters
        ----------
        config : dict
            ``config.json`` as saved by ``InternVLConfig``; missing keys take its defaults.
        settings : dict, optional
            Of the processor, by file name: ``min_patches`` and ``max_patches`` are tiles. Images are
            always cut, whatever ``crop_to_patches`` says: so does the family's processor.

        Raises
        ------
        ConfigError
            If a value is one that the rule does not describe.
        """
        vision = config.get("vision_config") or {}
        strategy = config.get("vision_feature_select_strategy", "default")
        if strategy != "default":
            raise ConfigError(
                "an InternVL model must have vision_feature_select_strategy 'default', found "
                f"{strategy!r}; the class token cannot be part of the patch map."
            )
        ratio = float(config.get("downsample_ratio", _DEFAULT_RATIO))
        factor = round(1 / ratio) if ratio > 0 else 0
        if factor < 1 or abs(factor * ratio - 1) > 1e-6:
            raise ConfigError(
                f"downsample_ratio must be one over a whole number, found {ratio}; correct config.json."
            )
        images = image_settings(settings or {})
        return cls(
            tile_px=_side(vision.get("image_size", _DEFAULT_TILE_PX), "image_size"),
            patch_px=_side(vision.get("patch_size", _DEFAULT_PATCH_PX), "patch_size"),
            factor=factor,
            min_tiles=int(images.get("min_patches", 1)),
            max_tiles=int(images.get("max_patches", _DEFAULT_MAX_TILES)),
            image_token_id=int(config.get("image_token_id", _DEFAULT_IMAGE_TOKEN_ID)),
        )

    @property
    def placeholders(self) -> Mapping[Modality, Placeholder]:
        """The same token for images and frames, inside start and end tokens."""
        placeholder = Placeholder(CONTEXT_TOKEN, self.image_token_id, IMAGE_START, IMAGE_END)
        return {Modality.IMAGE: placeholder, Modality.VIDEO: placeholder}

    @property
    def patches_per_side(self) -> int:
        """Patches along one side of a tile."""
        return self.tile_px // self.patch_px

    @property
    def tokens_per_tile(self) -> int:
        """LLM tokens of one tile or frame."""
        return (self.patches_per_side // self.factor) ** 2

    def image(self, height: int, width: int, num_images: int) -> MediaItem:
        """One image; images that share a sample are cut as well.

        Raises
        ------
        DataError
            If a size is below one pixel.
        """
        check_image_size(height, width)
        columns, rows = self.grid(height, width)
        num_tiles = columns * rows + (columns * rows > 1)
        return MediaItem(MediaKind.TILED_IMAGE, num_tiles, num_tiles, num_tiles * self.tokens_per_tile)

    def clip(
        self, num_frames: int, height: int = 0, width: int = 0, frame_interval_s: float = 0.0
    ) -> MediaItem:
        """One clip; its size does not matter.

        Raises
        ------
        DataError
            If there is no frame.
        """
        check_num_frames(num_frames)
        return MediaItem(MediaKind.CLIP, num_frames, num_frames, num_frames * self.tokens_per_tile)

    def text(self, modality: Modality, item: MediaItem) -> str:
        """Frames are numbered, one a line."""
        one = super().text(modality, item)
        if modality is Modality.IMAGE:
            return one
        return "\n".join(f"Frame{number}: {one}" for number in range(1, item.num_inputs + 1))

    def runs(self, item: MediaItem) -> tuple[int, ...]:
        """One run for an image, one for every frame of a clip."""
        if item.kind is MediaKind.CLIP:
            return (self.tokens_per_tile,) * item.num_inputs
        return (item.num_tokens,)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows of tiles of an image of ``height x width`` pixels."""
        grids = _grids(self.min_tiles, self.max_tiles)
        if not grids:
            return 1, 1
        ratio = width / height
        distances = [abs(ratio - columns / rows) for columns, rows in grids]
        nearest = min(distances)
        equal = [grid for grid, distance in zip(grids, distances, strict=True) if distance == nearest]
        filled = [
            (columns, rows)
            for columns, rows in equal[1:]
            if height * width > 0.5 * self.tile_px * self.tile_px * columns * rows
        ]
        return filled[-1] if filled else equal[0]


@functools.cache
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Grids as (columns, rows), by number of tiles, then by columns."""
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def _side(value: Any, name: str) -> int:
    sides = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(sides) != 1:
        raise ConfigError(
            f"vision_config.{name} must be a square, found {value}; "
            "the model cannot shuffle other patch maps."
        )
    return int(sides.pop())


FAMILY = Family(
    model_type="internvl",
    rule=InternVLRule.from_config,
    processor="dflop_ds.data.processors.internvl:open_processor",
    layers="dflop_ds.models.internvl:pipeline_layers",
    published_names=(
        ("model.vision_tower.", "vision_tower."),
        ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
)
