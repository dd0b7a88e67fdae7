"""Media that a record holds itself: encoded files as bytes, images, frames and recordings as arrays."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dflop_ds.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class MediaBytes:
    """A media file in memory.

    Attributes
    ----------
    name : str
        For messages.
    content : bytes
    """

    name: str
    content: bytes = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.name


Source = str | Path | MediaBytes
"""Where a media file is: on disk, or in memory."""


def as_source(source: Source) -> Path | MediaBytes:
    """The source, a path as ``Path``."""
    return source if isinstance(source, MediaBytes) else Path(source)


def readable(source: Path | MediaBytes) -> Any:
    """What decoders open: the path, or a new stream over the bytes.

    Raises
    ------
    DataError
        If the path is a named pipe, on which a decoder would wait for ever.
    """
    if isinstance(source, MediaBytes):
        return io.BytesIO(source.content)
    if source.is_fifo():
        raise DataError(f"{source} must be a file, found a named pipe; correct the path or drop the sample.")
    # FFmpeg takes what comes before a colon for a protocol, and would go to the network for some.
    return str(source.absolute())


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """Sound in memory.

    Attributes
    ----------
    samples : ndarray of float32, shape (num_channels, num_samples)
    sampling_rate_hz : int
    """

    samples: npt.NDArray[np.float32]
    sampling_rate_hz: int


def media_value(value: Any, name: str, is_clip: bool) -> Any:
    """One medium of a record in a form that the reader takes.

    Parameters
    ----------
    value : object
        A path; ``{"bytes": ..., "path": ...}`` as ``datasets`` keeps encoded files; an image of PIL or
        an array (height, width[, channels]) of uint8; a clip as an array (frames, height, width,
        channels) or a list of images; ``{"array": ..., "sampling_rate": ...}``.
    name : str
        For messages.
    is_clip : bool

    Returns
    -------
    str, MediaBytes, Image, Recording or list of ndarray
        A path where the record names a file, decoded frames for a clip.

    Raises
    ------
    DataError
        If it is none of them.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return MediaBytes(str(value.get("path") or name), value["bytes"])
        if isinstance(value.get("path"), str):
            return value["path"]
        if value.get("array") is not None and isinstance(value.get("sampling_rate"), int):
            samples = np.atleast_2d(np.asarray(value["array"], dtype=np.float32))
            return Recording(samples, value["sampling_rate"])
    elif is_clip and isinstance(value, (list, np.ndarray)) and len(value):
        return [np.asarray(_image(frame, name).convert("RGB")) for frame in value]
    elif not is_clip and isinstance(value, (Image.Image, np.ndarray)):
        return _image(value, name)
    raise DataError(
        f"{name} must be a path, an encoded file, an image, an array of uint8 or a recording with its "
        f"sampling_rate, found {type(value).__name__}; correct the record."
    )


def _image(value: Any, name: str) -> Image.Image:
    if isinstance(value, Image.Image):
        return value
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise DataError(
            f"{name} must be an array (height, width[, channels]) of uint8, found {array.dtype} of shape "
            f"{array.shape}; convert it."
        )
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)
