"""Qwen2-Audio: Whisper-style encoder with Qwen2 or Llama, windows of 30 s."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
)

from benchmarks.parity.compare import AUDIO_CASES, TEXT_CASES, Media, ParitySample, Variant
from dflop_ds.families import MediaKind
from dflop_ds.families.qwen2_audio import HOP_SAMPLES

AUDIO_ID, VOCAB, MEL_BINS = 99, 100, 8
_WINDOW_FRAMES = 3000
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LANGUAGES = {"Qwen2": Qwen2Config, "Llama": LlamaConfig}
_ODD_CASES = {
    "audio of one token": [Media(recordings=(640,))],
    "some without tokens": [Media(recordings=(5_000, 161, 8_000)), Media(recordings=(160,)), Media()],
}


def make_config(language: str = "Qwen2") -> Qwen2AudioConfig:
    """A tiny model with the window of published ones."""
    audio = Qwen2AudioEncoderConfig(
        d_model=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        num_mel_bins=MEL_BINS,
        max_source_positions=_WINDOW_FRAMES // 2,
    )
    return Qwen2AudioConfig(
        audio_config=audio.to_dict(),
        text_config=_LANGUAGES[language](**_TEXT).to_dict(),
        audio_token_index=AUDIO_ID,
    )


def reference_inputs(sample: ParitySample) -> dict[str, torch.Tensor]:
    """Whole windows, and which of their frames are no silence."""
    # With a single placeholder in the text the reference merges in another way, which needs this mask.
    inputs = {"attention_mask": torch.ones_like(sample.input_ids)[None]}
    windows = [
        F.pad(rows.transpose(0, 1), (0, _WINDOW_FRAMES - len(rows)))
        for rows in sample.values_of(MediaKind.AUDIO)
    ]
    if windows:
        frames = torch.tensor([-(-num // HOP_SAMPLES) for num in sample.media.recordings])
        inputs["input_features"] = torch.stack(windows)
        inputs["feature_attention_mask"] = (torch.arange(_WINDOW_FRAMES) < frames[:, None]).long()
    return inputs


VARIANTS = [
    Variant(
        name=f"Qwen2-Audio, {language}",
        config=make_config(language),
        reference=Qwen2AudioForConditionalGeneration,
        row_shape=(MEL_BINS,),
        reference_inputs=reference_inputs,
        cases={**TEXT_CASES, **AUDIO_CASES, **_ODD_CASES},
    )
    for language in _LANGUAGES
]
