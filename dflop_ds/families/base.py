"""What a model family must tell about its media before anything is decoded."""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class MediaShape:
    """What one image or clip costs.

    Attributes
    ----------
    num_inputs : int
        Encoder batch entries: tiles of an image, frames of a clip.
    num_tokens : int
        LLM tokens that it becomes, newline tokens included.
    """

    num_inputs: int
    num_tokens: int


class MediaRule(Protocol):
    """Sizes in, encoder inputs and LLM tokens out; one implementation per model family."""

    @property
    def tile_px(self) -> int:
        """Side of the square encoder input, in pixels."""

    @property
    def image_token_id(self) -> int:
        """Token that stands for an image."""

    @property
    def video_token_id(self) -> int:
        """Token that stands for a clip."""

    def image(self, height: int, width: int, num_images: int) -> MediaShape:
        """Shape of one image.

        Parameters
        ----------
        height, width : int
            Size in pixels after EXIF orientation.
        num_images : int
            Images in the sample; a lone image may be cut into tiles.
        """

    def clip(self, num_frames: int) -> MediaShape:
        """Shape of one clip of which ``num_frames`` frames are used."""
