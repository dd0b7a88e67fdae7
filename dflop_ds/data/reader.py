"""Media files of samples: sizes from headers, and decoded content when it is wanted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from dflop_ds.data.audio import audio_info, load_audio, resample, resampled_length
from dflop_ds.data.conversation import MediaRef
from dflop_ds.data.media import (
    clip_info,
    frame_indices,
    image_size,
    load_frames,
    load_image,
    upright_rgb,
    upright_size,
)
from dflop_ds.data.memory import MediaBytes, Recording
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import MediaItem, MediaRule, Modality

logger = logging.getLogger(__name__)

LongAudio = Literal["cut", "refuse"]


class MediaReader:
    """Reads the media files that records name.

    Parameters
    ----------
    root : str or Path
        Folder that relative paths start from.
    rule : MediaRule
    max_frames : int
        Frames taken of one clip at most.
    frames_per_second : float
        Sampling rate of clips.
    long_audio : {"cut", "refuse"}
        What happens to recordings of which the model takes the beginning only.

    Raises
    ------
    ConfigError
        If a setting is out of range.
    """

    def __init__(
        self,
        root: str | Path,
        rule: MediaRule,
        max_frames: int,
        frames_per_second: float,
        long_audio: LongAudio = "cut",
    ) -> None:
        if max_frames < 1 or not frames_per_second > 0:
            raise ConfigError(
                "a data set needs max_frames >= 1 and frames_per_second > 0, found "
                f"{max_frames} and {frames_per_second}; correct the settings."
            )
        self.root = Path(root)
        self.rule = rule
        self.max_frames = max_frames
        self.frames_per_second = frames_per_second
        self.long_audio: LongAudio = long_audio
        self._has_cut = False

    def source(self, ref: MediaRef) -> Path | MediaBytes:
        """Where a file is."""
        return ref.value if isinstance(ref.value, MediaBytes) else self.root / ref.path

    def item(self, ref: MediaRef, num_images: int) -> MediaItem:
        """What a file will become, from its header.

        Parameters
        ----------
        ref : MediaRef
        num_images : int
            Images in the sample.

        Raises
        ------
        DataError
            If the header cannot be read or the model does not take the file.
        """
        if ref.is_decoded:
            return self._decoded_item(ref, num_images)
        path = self.source(ref)
        if ref.modality is Modality.VIDEO:
            info = clip_info(path)
            num_frames = len(self._frame_indices(info.num_frames, info.fps))
            used_fps = num_frames / info.num_frames * info.fps
            size = upright_size(path) if self.rule.needs_upright_size else (info.height, info.width)
            return self.rule.clip(num_frames, *size, 1.0 / used_fps if used_fps > 0 else 0.0)
        if ref.modality is Modality.AUDIO:
            recording = audio_info(path)
            return self._audio_item(recording.num_samples, recording.sampling_rate_hz, str(path))
        height, width = image_size(path)
        return self.rule.image(height, width, num_images)

    def load(self, ref: MediaRef) -> Any:
        """Decoded content: a PIL image, the frames of a clip as uint8 arrays (height, width, 3), or
        the float32 samples of a recording.

        Raises
        ------
        DataError
            If the file cannot be decoded.
        """
        if ref.is_decoded:
            return self._decoded(ref)
        path = self.source(ref)
        if ref.modality is Modality.VIDEO:
            info = clip_info(path)
            return load_frames(path, self._frame_indices(info.num_frames, info.fps))
        if ref.modality is Modality.AUDIO:
            return load_audio(path, self.rule.sampling_rate_hz, self.rule.max_audio_samples)
        return load_image(path)

    def _decoded_item(self, ref: MediaRef, num_images: int) -> MediaItem:
        """What a medium in memory will become; the rate of a clip of frames is not known."""
        content = self._decoded(ref)
        if ref.modality is Modality.VIDEO:
            height, width = content[0].shape[:2]
            return self.rule.clip(len(content), height, width, 0.0)
        if ref.modality is Modality.AUDIO:
            recording: Recording = ref.value
            return self._audio_item(recording.samples.shape[1], recording.sampling_rate_hz, "in memory")
        return self.rule.image(content.height, content.width, num_images)

    def _audio_item(self, num_samples: int, sampling_rate_hz: int, name: str) -> MediaItem:
        wanted_hz, limit = self.rule.sampling_rate_hz, self.rule.max_audio_samples
        resampled = resampled_length(num_samples, sampling_rate_hz, wanted_hz)
        if limit is not None and resampled > limit:
            found = f"the recording {name} must last at most {limit / wanted_hz:g} s, found "
            found += f"{resampled / wanted_hz:.6g} s"
            if self.long_audio == "refuse":
                raise DataError(
                    f"{found}; cut it into recordings of that length, "
                    'or set "long_audio": "cut" to use its beginning.'
                )
            if not self._has_cut:
                logger.warning("%s; its beginning is used, and that of others like it.", found)
            self._has_cut = True
        return self.rule.audio(resampled)

    def _decoded(self, ref: MediaRef) -> Any:
        if ref.modality is Modality.VIDEO:
            return [ref.value[index] for index in self._frame_indices(len(ref.value), 0.0)]
        if ref.modality is Modality.AUDIO:
            return resample(ref.value, self.rule.sampling_rate_hz, self.rule.max_audio_samples)
        return upright_rgb(ref.value)

    def _frame_indices(self, num_frames: int, fps: float) -> list[int]:
        return frame_indices(num_frames, fps, self.frames_per_second, self.max_frames)
