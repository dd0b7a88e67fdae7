"""Qwen2-Audio: mel frames of recordings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import WhisperFeatureExtractor

from dflop_ds.errors import ConfigError
from dflop_ds.families import MediaItem
from dflop_ds.families.qwen2_audio import HOP_SAMPLES, Qwen2AudioRule


class Qwen2AudioProcessor:
    """Rows are mel frames of shape (num_mel_bins,), without the silence that fills a window.

    Parameters
    ----------
    feature_extractor : WhisperFeatureExtractor
    rule : Qwen2AudioRule

    Raises
    ------
    ConfigError
        If they do not belong together.
    """

    def __init__(self, feature_extractor: WhisperFeatureExtractor, rule: Qwen2AudioRule) -> None:
        wanted = (rule.sampling_rate_hz, HOP_SAMPLES, rule.window_frames, rule.num_mel_bins)
        found = (
            feature_extractor.sampling_rate,
            feature_extractor.hop_length,
            feature_extractor.nb_max_frames,
            feature_extractor.feature_size,
        )
        if found != wanted:
            raise ConfigError(
                "sampling rate, hop, frames of a window and mel bins of preprocessor_config.json must be "
                f"{wanted}, as config.json has it, found {found}; use the files that belong together."
            )
        if feature_extractor.padding_side != "right":
            raise ConfigError(
                f'padding_side of preprocessor_config.json must be "right", found '
                f'"{feature_extractor.padding_side}"; a window is read from its beginning: correct it.'
            )
        self.feature_extractor = feature_extractor
        self.row_shape = (rule.num_mel_bins,)

    def rows(self, items: Sequence[MediaItem], media: Sequence[Any]) -> list[torch.Tensor]:
        """See :class:`dflop_ds.data.processor.MediaProcessor`."""
        return [self._frames(one)[: item.num_rows] for item, one in zip(items, media, strict=True)]

    def _frames(self, samples: Any) -> torch.Tensor:
        """Mel frames of a whole window, shape (frames, num_mel_bins)."""
        rate_hz = self.feature_extractor.sampling_rate
        found = self.feature_extractor(samples, sampling_rate=rate_hz, return_tensors="pt")
        return found["input_features"][0].to(torch.float32).transpose(0, 1)


def open_processor(model_dir: Path, rule: Qwen2AudioRule) -> Qwen2AudioProcessor:
    """Processor of a local model directory.

    Raises
    ------
    OSError, ValueError, ConfigError
        If its settings are missing, damaged or of another model.
    """
    extractor = WhisperFeatureExtractor.from_pretrained(model_dir, local_files_only=True)
    return Qwen2AudioProcessor(extractor, rule)
