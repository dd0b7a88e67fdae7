"""Recordings: length, rate and channels from file headers, and mono samples when they are wanted.

The header decides how many samples a recording has, since LLM tokens are counted before anything is
decoded. Decoders of lossy formats may find some milliseconds more or less (encoder delay, rounding of
containers): the decoded recording is cut or padded with silence to the header's length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from dflop_ds.data.media import FILE_REMEDY, naming_file
from dflop_ds.data.memory import MediaBytes, Recording, Source, as_source, readable
from dflop_ds.errors import DataError

_WHAT = "recording"
_ESTIMATED_FORMATS = ("mp3", "aac")
"""Containers without a length of their own, where FFmpeg may have guessed it from the bit rate."""
_TOLERANCE_S = 0.25
"""Decoded and stated length may differ by this: some packets of a lossy codec."""


@dataclasses.dataclass(frozen=True, slots=True)
class AudioInfo:
    """What a container says about its first audio stream.

    Attributes
    ----------
    num_samples : int
        Samples per channel, at ``sampling_rate_hz``.
    sampling_rate_hz : int
    num_channels : int
    """

    num_samples: int
    sampling_rate_hz: int
    num_channels: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.num_samples / self.sampling_rate_hz


def audio_info(path: Source) -> AudioInfo:
    """Length, rate and channels of a recording (or of a film's sound) from its container.

    Packets are walked through, still without decoding, where the container names no length of its own.

    Raises
    ------
    DataError
        If the file is missing, holds no sound, or not a single sample.
    """
    path = as_source(path)
    with naming_file(path, _WHAT), av.open(readable(path)) as container:
        stream = _audio_stream(container, path)
        duration_s = 0.0
        if stream.duration is not None and stream.time_base is not None:
            duration_s = float(stream.duration * stream.time_base)
        if duration_s <= 0 or container.format.name in _ESTIMATED_FORMATS:
            packets_s = _packets_s(container, stream)
            if abs(duration_s - packets_s) > _TOLERANCE_S:
                duration_s = packets_s
        num_samples = round(duration_s * stream.rate)
        if num_samples < 1:
            raise DataError(f"{_WHAT} {path} must have at least one sample, found none; {FILE_REMEDY}")
        return AudioInfo(num_samples, stream.rate, stream.codec_context.channels)


def resampled_length(num_samples: int, sampling_rate_hz: int, target_hz: int) -> int:
    """Samples after resampling: the smallest number that covers the recording."""
    return -(-num_samples * target_hz // sampling_rate_hz)


def load_audio(
    path: Source, sampling_rate_hz: int, max_samples: int | None = None
) -> npt.NDArray[np.float32]:
    """Decode a recording as mono at the wanted rate.

    Channels are averaged. The result is as long as :func:`resampled_length` of the header says.

    Parameters
    ----------
    path : str or Path
    sampling_rate_hz : int
        Wanted rate.
    max_samples : int, optional
        Samples at the wanted rate after which decoding stops.

    Returns
    -------
    ndarray of float32, shape (num_samples,)
        Full scale is -1 to 1.

    Raises
    ------
    DataError
        If the file cannot be decoded, or its length differs from the header's.
    """
    path = as_source(path)
    info = audio_info(path)
    num_stated = resampled_length(info.num_samples, info.sampling_rate_hz, sampling_rate_hz)
    num_wanted = num_stated if max_samples is None else min(num_stated, max_samples)
    num_tolerated = round(_TOLERANCE_S * sampling_rate_hz)
    blocks: list[npt.NDArray[np.float32]] = []
    num_decoded = 0
    with naming_file(path, _WHAT), av.open(readable(path)) as container:
        for block in _resampled_blocks(container, _audio_stream(container, path), sampling_rate_hz):
            blocks.append(block)
            num_decoded += len(block)
            # What follows is not wanted; a little more shows that the header was wrong.
            if num_decoded > num_wanted + num_tolerated:
                break
    too_long = num_wanted == num_stated and num_decoded > num_wanted + num_tolerated
    if num_decoded < num_wanted - num_tolerated or too_long:
        raise DataError(
            f"{_WHAT} {path} must last {info.duration_s:.3f} s by its header, found "
            f"{'more' if too_long else f'{num_decoded / sampling_rate_hz:.3f} s'}; {FILE_REMEDY}"
        )
    samples = np.concatenate([*blocks, np.zeros(max(num_wanted - num_decoded, 0), dtype=np.float32)])
    return samples[:num_wanted]


def _audio_stream(container: av.container.InputContainer, path: Path | MediaBytes) -> av.AudioStream:
    if not container.streams.audio:
        raise DataError(f"{_WHAT} {path} must have an audio stream, found none; {FILE_REMEDY}")
    stream = container.streams.audio[0]
    if not stream.rate:
        raise DataError(f"{_WHAT} {path} must have a sampling rate, found none; {FILE_REMEDY}")
    return stream


def _packets_s(container: av.container.InputContainer, stream: av.AudioStream) -> float:
    """Seconds from the first packet, or from zero if it lies before, to the end of the last one."""
    first: int | None = None
    end = 0
    for packet in container.demux(stream):
        if packet.size:
            start = end if packet.pts is None else packet.pts
            first = max(start, 0) if first is None else first
            end = max(end, start + (packet.duration or 0))
    return float((end - (first or 0)) * stream.time_base) if stream.time_base is not None else 0.0


def _resampled_blocks(
    container: av.container.InputContainer, stream: av.AudioStream, sampling_rate_hz: int
) -> Iterator[npt.NDArray[np.float32]]:
    """Mono blocks at the wanted rate.

    Channels are averaged here, since FFmpeg's own mix of float samples is not scaled to full scale.
    """
    # Interleaved: PyAV crashes on frames with eight planes or more.
    to_float = av.AudioResampler(format="flt")
    parts = (part for frame in container.decode(stream) for part in to_float.resample(frame))
    blocks = ((_by_channel(part), part.sample_rate) for part in parts)
    yield from _mono_blocks(blocks, sampling_rate_hz)


def _by_channel(frame: av.AudioFrame) -> npt.NDArray[np.float32]:
    """Samples of an interleaved frame, shape (channels, samples)."""
    interleaved = frame.to_ndarray().astype(np.float32)
    return np.ascontiguousarray(interleaved.reshape(-1, frame.layout.nb_channels).T)


def _mono_blocks(
    blocks: Iterable[tuple[npt.NDArray[np.float32], int]], sampling_rate_hz: int
) -> Iterator[npt.NDArray[np.float32]]:
    """Blocks (channels, samples) with their rate as mono blocks at the wanted rate."""
    to_rate = av.AudioResampler(format="flt", layout="mono", rate=sampling_rate_hz)
    for block, rate_hz in blocks:
        mono = block.mean(axis=0, dtype=np.float32, keepdims=True)
        single = av.AudioFrame.from_ndarray(mono, format="flt", layout="mono")
        single.sample_rate = rate_hz
        for resampled in to_rate.resample(single):
            yield resampled.to_ndarray()[0]
    for resampled in to_rate.resample(None):
        yield resampled.to_ndarray()[0]


def resample(
    recording: Recording, sampling_rate_hz: int, max_samples: int | None = None
) -> npt.NDArray[np.float32]:
    """A recording in memory as :func:`load_audio` returns one from a file."""
    num_samples = resampled_length(recording.samples.shape[1], recording.sampling_rate_hz, sampling_rate_hz)
    num_wanted = num_samples if max_samples is None else min(num_samples, max_samples)
    blocks = _mono_blocks([(recording.samples, recording.sampling_rate_hz)], sampling_rate_hz)
    samples = np.concatenate([*blocks, np.zeros(num_wanted, dtype=np.float32)])
    return samples[:num_wanted]
