"""Frames of clips as square encoder inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.image_utils import SizeDict

from dflop_ds.errors import ConfigError


def check_side(image_processor: Any, side_px: int) -> None:
    """Refuse an image processor that makes tiles of another side than the encoder takes.

    Raises
    ------
    ConfigError
    """
    size = image_processor.size
    if (size.get("height"), size.get("width")) != (side_px, side_px):
        raise ConfigError(
            f"the image processor must resize to the encoder's {side_px} x {side_px} px, found {size}; "
            "use the preprocessor_config.json that belongs to the model."
        )


def square_frames(image_processor: Any, frames: Sequence[np.ndarray], side_px: int) -> torch.Tensor:
    """Frames squeezed into the encoder's square, as the families' video processors do.

    Parameters
    ----------
    image_processor : PIL image processor of transformers
    frames : sequence of ndarray of uint8, shape (height, width, 3)
    side_px : int

    Returns
    -------
    Tensor of float32, shape (num_frames, 3, side_px, side_px)
    """
    size = SizeDict(height=side_px, width=side_px)
    rows = []
    for frame in frames:
        pixels = image_processor.resize(
            np.moveaxis(frame, -1, 0), size=size, resample=image_processor.resample
        )
        pixels = image_processor.rescale(pixels, image_processor.rescale_factor)
        rows.append(image_processor.normalize(pixels, image_processor.image_mean, image_processor.image_std))
    return torch.from_numpy(np.stack(rows)).to(torch.float32)
