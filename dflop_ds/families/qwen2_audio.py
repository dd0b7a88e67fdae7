"""Qwen2-Audio: how many encoder positions and LLM tokens a recording becomes.

A recording is one window of the encoder, 30 s in published models: longer ones are cut to their first
window, as the family's processor does by default. A mel frame is taken every 160 samples at 16 kHz; the
second convolution halves the frames to encoder positions, and the average pool halves those to tokens.
What the recording does not fill of the window becomes no token. Hence a recording of at most 320 samples
becomes none at all: its placeholder vanishes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families.base import MediaItem, MediaKind, MediaRule, Modality, Placeholder
from dflop_ds.families.registry import Family
from dflop_ds.flops import ModelDims

HOP_SAMPLES = 160
"""Of the family's feature extractor."""

_DEFAULT_POSITIONS = 1500
_DEFAULT_MEL_BINS = 128
_DEFAULT_AUDIO_TOKEN_ID = 151646
_FRAMES_PER_POSITION = 2
_POSITIONS_PER_TOKEN = 2


@dataclasses.dataclass(frozen=True)
class Qwen2AudioRule(MediaRule):
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

    sampling_rate_hz: ClassVar[int] = 16_000

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
    def placeholders(self) -> Mapping[Modality, Placeholder]:
        """Audio only, between its begin and end tokens."""
        return {
            Modality.AUDIO: Placeholder("<|AUDIO|>", self.audio_token_id, "<|audio_bos|>", "<|audio_eos|>")
        }

    @property
    def window_frames(self) -> int:
        """Mel frames of a window."""
        return _FRAMES_PER_POSITION * self.max_positions

    @property
    def max_audio_samples(self) -> int:
        """Samples of a window; what follows in a recording is not used."""
        return self.window_frames * HOP_SAMPLES

    def audio(self, num_samples: int) -> MediaItem:
        """One recording, see :class:`dflop_ds.families.base.MediaRule`.

        Encoder inputs are the positions that the recording fills. Rows are mel frames: those of its
        positions, and the one behind, which the convolutions see.

        Raises
        ------
        DataError
            If there is no sample.
        """
        if num_samples < 1:
            raise DataError(
                f"a recording must have at least 1 sample, found {num_samples}; replace or drop it."
            )
        num_frames = -(-min(num_samples, self.max_audio_samples) // HOP_SAMPLES)
        num_positions = -(-num_frames // _FRAMES_PER_POSITION)
        return MediaItem(
            kind=MediaKind.AUDIO,
            num_inputs=num_positions,
            num_rows=min(_FRAMES_PER_POSITION * num_positions + 1, self.window_frames),
            num_tokens=num_positions // _POSITIONS_PER_TOKEN,
            extent=(num_samples,),
        )

    def sizes(self, item: MediaItem) -> Mapping[str, float]:
        """Positions, the work of attention between them, and the whole length of a recording in seconds."""
        return {
            "audio_positions": item.num_inputs,
            "sum_squared_frames": item.num_inputs**2,
            "audio_s": item.extent[0] / self.sampling_rate_hz,
        }

    def texts(self, media: Sequence[tuple[Modality, MediaItem]]) -> list[str]:
        """Recordings are numbered through the conversation, as the family's chat template does it."""
        single = super().texts(media)
        return [f"Audio {number}: {text}" for number, text in enumerate(single, start=1)]


FAMILY = Family(
    model_type="qwen2_audio",
    rule=lambda config, settings: Qwen2AudioRule.from_config(config),
    processor="dflop_ds.data.processors.qwen2_audio:open_processor",
    layers="dflop_ds.models.qwen2_audio:pipeline_layers",
    dims=ModelDims.from_audio_config,
    published_names=(
        ("model.audio_tower.", "audio_tower."),
        ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
)
