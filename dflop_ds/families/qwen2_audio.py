"""Qwen2-Audio: how many encoder positions and LLM tokens a recording becomes.

A recording is one window of the encoder, 30 s in published models: longer ones are cut to their first
window, as the family's processor does by default, and shorter ones are padded with silence. A mel frame
is taken every ``hop_samples``; the second convolution halves the frames to encoder positions, and
the average pool halves those to tokens. Of the window only what the recording covers becomes tokens,
so that a recording of at most ``2 * hop_samples`` becomes none: its placeholder vanishes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families.base import MediaItem, MediaKind

SAMPLING_RATE_HZ = 16_000
HOP_SAMPLES = 160
"""Of the family's feature extractor, which ``config.json`` does not name."""

_DEFAULT_POSITIONS = 1500
_DEFAULT_MEL_BINS = 128
_DEFAULT_AUDIO_TOKEN_ID = 151646
_FRAMES_PER_POSITION = 2


@dataclasses.dataclass(frozen=True)
class Qwen2AudioRule:
    """Audio sizes of a Qwen2-Audio model.

    Attributes
    ----------
    max_positions : int
        Encoder positions of a window.
    num_mel_bins : int
        Mel bands of a frame.
    audio_token_id : int
        Placeholder token.
    """

    max_positions: int
    num_mel_bins: int
    audio_token_id: int

    def __post_init__(self) -> None:
        if self.max_positions < 2 or self.num_mel_bins < 1:
            raise ConfigError(
                "audio_config must have max_source_positions of at least 2 and num_mel_bins of at least 1, "
                f"found {self.max_positions} and {self.num_mel_bins}; correct the model's config.json."
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen2AudioRule:
        """Read the rule from the content of a ``config.json``.

        Parameters
        ----------
        config : dict
            As saved by ``Qwen2AudioConfig``; missing keys take its defaults.

        Raises
        ------
        ConfigError
            If a value is one that the rule does not describe.
        """
        audio = config.get("audio_config") or {}
        encoder = audio.get("model_type", "qwen2_audio_encoder")
        if encoder != "qwen2_audio_encoder":
            raise ConfigError(
                f"a Qwen2-Audio model must use a qwen2_audio_encoder, found {encoder!r}; "
                "use such a checkpoint."
            )
        token_id = config.get("audio_token_index", config.get("audio_token_id", _DEFAULT_AUDIO_TOKEN_ID))
        return cls(
            max_positions=int(audio.get("max_source_positions", _DEFAULT_POSITIONS)),
            num_mel_bins=int(audio.get("num_mel_bins", _DEFAULT_MEL_BINS)),
            audio_token_id=int(token_id),
        )

    @property
    def window_frames(self) -> int:
        """Mel frames of a window."""
        return _FRAMES_PER_POSITION * self.max_positions

    @property
    def window_samples(self) -> int:
        """Samples of a window at 16 kHz; what follows in a recording is not used."""
        return self.window_frames * HOP_SAMPLES

    def num_frames(self, num_samples: int) -> int:
        """Mel frames that a recording of ``num_samples`` samples at 16 kHz covers.

        Raises
        ------
        DataError
            If there is no sample.
        """
        if num_samples < 1:
            raise DataError(
                f"a recording must have at least 1 sample, found {num_samples}; replace or drop it."
            )
        return -(-min(num_samples, self.window_samples) // HOP_SAMPLES)

    def num_positions(self, num_samples: int) -> int:
        """Encoder positions that attention sees; the others of the window are masked."""
        return -(-self.num_frames(num_samples) // _FRAMES_PER_POSITION)

    def audio(self, num_samples: int) -> MediaItem:
        """Shape of one recording of ``num_samples`` samples at 16 kHz.

        Raises
        ------
        DataError
            If there is no sample.
        """
        num_positions = self.num_positions(num_samples)
        return MediaItem(MediaKind.AUDIO, 1, 1, num_positions // 2, (num_positions,))
