"""What turns decoded media into rows of the media tensor; one implementation per model family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dflop_ds.families import MediaItem


class MediaProcessor(Protocol):
    """Decoded media in, rows of the media tensor out.

    Attributes
    ----------
    row_shape : tuple of int
        Shape of one row, such as (3, tile_px, tile_px); the same for all media of the family.
    """

    row_shape: tuple[int, ...]

    def rows(self, items: Sequence[MediaItem], media: Sequence[Any]) -> list[torch.Tensor]:
        """Rows of every media item of one sample.

        Parameters
        ----------
        items : sequence of MediaItem
            In the order of their placeholders.
        media : sequence
            As decoded by :meth:`dflop_ds.data.reader.MediaReader.load`.

        Returns
        -------
        list of Tensor of float32, shape (item.num_rows, *row_shape)
        """


SETTINGS_FILES = ("preprocessor_config", "video_preprocessor_config", "processor_config")


def read_settings(model_dir: Path) -> dict[str, dict[str, Any]]:
    """Content of the files in a model directory that describe its media processor.

    Returns
    -------
    dict of str to dict
        By file name without ``.json``; files that are not there are left out.

    Raises
    ------
    ValueError
        If a file is no JSON.
    """
    paths = {name: model_dir / f"{name}.json" for name in SETTINGS_FILES}
    return {name: dict(json.loads(path.read_bytes())) for name, path in paths.items() if path.is_file()}
