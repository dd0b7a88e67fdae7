"""Images and clips: sizes from file headers, and pixels when they are wanted.

Sizes never decode a pixel, so a data set of millions of files can be scanned. Whatever goes wrong
with a file becomes a :class:`~dflop_ds.errors.DataError` that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from dflop_ds.data.memory import MediaBytes, Source, as_source, readable
from dflop_ds.errors import DataError

FILE_REMEDY = (
    'replace the file or drop the sample; "scan": "decode" with "broken": "drop" finds such files beforehand.'
)
_SIDEWAYS = (5, 6, 7, 8)
_PNG_SIGNATURE_BYTES = 8
_PNG_CHUNK_OVERHEAD_BYTES = 4
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257


@dataclasses.dataclass(frozen=True, slots=True)
class ClipInfo:
    """What a container says about its first video stream.

    Attributes
    ----------
    num_frames : int
        Frames that decoding gives.
    fps : float
        Average frames per second; 0 when unknown.
    height, width : int
        Coded size in pixels, before a rotation that the container may ask for.
    """

    num_frames: int
    fps: float
    height: int
    width: int


@contextlib.contextmanager
def naming_file(path: Path | MediaBytes, what: str) -> Iterator[None]:
    """Turn any failure inside into a DataError about ``path``.

    Decoders raise almost anything on damaged input (SyntaxError, KeyError, struct.error, ...).
    """
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{what} {path} must exist, found no such file; correct the path or drop the sample."
        ) from error
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise DataError(f"{what} {path} must be readable, found {found}; {FILE_REMEDY}") from error


def image_size(path: Source) -> tuple[int, int]:
    """Height and width of an image in pixels, after EXIF orientation, from its header.

    Raises
    ------
    DataError
        If the file is missing or no image.
    """
    path = as_source(path)
    with naming_file(path, "image"), Image.open(readable(path)) as image:
        width, height = image.size
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            # Some versions of Pillow turn the size of a TIFF upright when they open it.
            width, height = int(image.tag_v2[_TIFF_WIDTH]), int(image.tag_v2[_TIFF_HEIGHT])
        if _orientation(image, path) in _SIDEWAYS:
            width, height = height, width
        return height, width


def _orientation(image: Image.Image, path: Path | MediaBytes) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        # Asking Pillow would decode the pixels, to reach metadata stored after them.
        if _has_late_orientation(path):
            image.load()
        exif = Image.Image.getexif(image)
    else:
        exif = image.getexif()
    return int(exif.get(ExifTags.Base.Orientation, 1))


def _has_late_orientation(path: Path | MediaBytes) -> bool:
    """Whether a PNG keeps EXIF or XMP data behind its pixels."""
    seen_pixels = False
    with io.BytesIO(path.content) if isinstance(path, MediaBytes) else open(path, "rb") as file:
        file.seek(_PNG_SIGNATURE_BYTES)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            seen_pixels = seen_pixels or kind == b"IDAT"
            if seen_pixels and _may_orient(kind, length, file):
                return True
            file.seek(length + _PNG_CHUNK_OVERHEAD_BYTES, 1)
    return False


def _may_orient(kind: bytes, length: int, file: BinaryIO) -> bool:
    if kind == b"eXIf":
        return True
    if kind not in (b"tEXt", b"zTXt", b"iTXt"):
        return False
    keyword = file.read(min(length, 32))
    file.seek(-len(keyword), 1)
    return keyword.startswith((b"Raw profile type exif", b"XML:com.adobe.xmp"))


def load_image(path: Source) -> Image.Image:
    """Decode an image as RGB, turned upright by its EXIF orientation.

    Palette, grayscale and CMYK become RGB as Pillow's ``convert("RGB")`` has it, which also
    drops an alpha channel. Of 16-bit values the upper 8 bits are kept (Pillow would clip them).

    Raises
    ------
    DataError
        If the file cannot be decoded.
    """
    path = as_source(path)
    with naming_file(path, "image"), Image.open(readable(path)) as opened:
        opened.load()
        return upright_rgb(opened)


def upright_rgb(image: Image.Image) -> Image.Image:
    """A decoded image as :func:`load_image` returns it."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def clip_info(path: Source) -> ClipInfo:
    """Frame count, rate and size of a clip from its container.

    Packets are walked through, still without decoding, when the container names no frame count.

    Raises
    ------
    DataError
        If the file is missing, no video, or has no frame.
    """
    path = as_source(path)
    with naming_file(path, "clip"), av.open(readable(path)) as container:
        stream = _video_stream(container, path)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        num_frames = _num_stated(container, stream)
        if not num_frames:
            num_frames, measured = _walk_packets(container, stream)
            # Such containers often state a rate that frames of varying length do not keep.
            fps = measured or fps
        if num_frames < 1:
            raise DataError(f"clip {path} must have at least one frame, found none; {FILE_REMEDY}")
        return ClipInfo(num_frames, fps, stream.height, stream.width)


def _num_stated(container: av.container.InputContainer, stream: av.VideoStream) -> int:
    """Frames by the header, 0 if it does not say; MP4 hides some of a clip that was cut without encoding."""
    if "mp4" not in container.format.name.split(","):
        return stream.frames
    return sum(not entry.is_discard for entry in stream.index_entries)


def _walk_packets(container: av.container.InputContainer, stream: av.VideoStream) -> tuple[int, float]:
    """Frames, and frames per second by their time stamps; a rate of 0 where they have none."""
    stamps = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
    known = [stamp for stamp in stamps if stamp is not None]
    extent = max(known) - min(known) if known else 0
    if len(known) < len(stamps) or not extent or stream.time_base is None:
        return len(stamps), 0.0
    return len(stamps), float((len(stamps) - 1) / (extent * stream.time_base))


def upright_size(path: Source) -> tuple[int, int]:
    """Height and width of the frames of a clip in pixels, turned as the container asks.

    The first frame is decoded: the rotation cannot be read from the container alone.

    Raises
    ------
    DataError
        If it cannot be decoded.
    """
    height, width = load_frames(path, [0])[0].shape[:2]
    return height, width


def frame_indices(num_frames_total: int, fps: float, frames_per_second: float, max_frames: int) -> list[int]:
    """Frames to use of a clip, evenly spaced.

    Parameters
    ----------
    num_frames_total : int
        Frames in the clip.
    fps : float
        Rate of the clip; when unknown (0), ``max_frames`` are taken.
    frames_per_second : float
        Wanted sampling rate.
    max_frames : int
        Upper limit.

    Returns
    -------
    list of int
        At least one index, strictly increasing, the first is 0.

    Raises
    ------
    DataError
        If a count is below one or a rate is negative.
    """
    if num_frames_total < 1 or max_frames < 1 or not frames_per_second > 0:
        raise DataError(
            "sampling a clip needs num_frames_total >= 1, max_frames >= 1 and frames_per_second > 0, found "
            f"{num_frames_total}, {max_frames} and {frames_per_second}; correct "
            "the settings or drop the clip."
        )
    num_frames = min(max_frames, num_frames_total)
    if fps > 0:
        wanted = num_frames_total / fps * frames_per_second
        num_frames = max(1, round(min(wanted, num_frames)))
    return [k * num_frames_total // num_frames for k in range(num_frames)]


def load_frames(path: Source, indices: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Decode frames of a clip, turned as the container asks, no further than the last one wanted.

    Parameters
    ----------
    path : str or Path
    indices : sequence of int
        Strictly increasing positions in presentation order.

    Returns
    -------
    list of ndarray of uint8, shape (height, width, 3)

    Raises
    ------
    DataError
        If the file cannot be decoded or holds fewer frames.
    """
    path = as_source(path)
    wanted = set(indices)
    frames: list[npt.NDArray[np.uint8]] = []
    num_decoded = 0
    with naming_file(path, "clip"), av.open(readable(path)) as container:
        for frame in container.decode(_video_stream(container, path)):
            if num_decoded in wanted:
                pixels = frame.to_ndarray(format="rgb24")
                frames.append(np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90))))
            num_decoded += 1
            if len(frames) == len(wanted):
                break
    if len(frames) < len(wanted):
        raise DataError(
            f"clip {path} must hold frame {max(wanted)}, found {num_decoded} frames; {FILE_REMEDY}"
        )
    return frames


def _video_stream(container: av.container.InputContainer, path: Path | MediaBytes) -> av.VideoStream:
    if not container.streams.video:
        raise DataError(f"clip {path} must have a video stream, found none; {FILE_REMEDY}")
    return container.streams.video[0]
