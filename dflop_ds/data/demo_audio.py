"""A small audio data set with a tiny Qwen2-Audio model, made on the spot without any download.

Recordings are sequences of tones of a low, middle or high pitch, which the answers name; lengths, rates
and channels vary as they do in instruction data.
"""

from __future__ import annotations

import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    WhisperFeatureExtractor,
)

from dflop_ds.data.demo import DemoPaths, chat_turns, check_num_samples, write_records
from dflop_ds.data.demo_model import TinyModelDims, tiny_text_config, train_tokenizer
from dflop_ds.data.demo_text import answer_text, chat_text, question_text

_MEDIA_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_MEL_BINS = 32
_PITCHES_HZ = {"low": (120.0, 250.0), "middle": (400.0, 800.0), "high": (1500.0, 3000.0)}
_RATES_HZ = (8_000, 16_000, 22_050)
_SHORTEST_S, _LONGEST_S = 0.2, 6.0
_FADE_S = 0.005
_FULL_SCALE = 32_767


def build_audio_demo(
    out: str | Path,
    *,
    num_samples: int = 256,
    seed: int = 0,
    dims: TinyModelDims | None = None,
    with_weights: bool = False,
) -> DemoPaths:
    """Write ``out/data`` and ``out/model``; the same arguments give the same files.

    About 55 % of the samples hold one recording, 15 % several and 30 % text only.

    Parameters
    ----------
    out : str or Path
    num_samples : int
    seed : int
    dims : TinyModelDims, optional
        Size of the model; its vision sizes are those of the audio encoder.
    with_weights : bool
        Also write random weights.

    Raises
    ------
    ConfigError
        If ``num_samples`` is below 1.
    """
    check_num_samples(num_samples)
    out = Path(out)
    media_root = out / "data"
    (media_root / "audio").mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng([seed, num_samples]).permutation(num_samples)
    num_one, num_several = round(0.55 * num_samples), round(0.15 * num_samples)
    records = []
    for number, rank in enumerate(order):
        rng = np.random.default_rng([seed, num_samples, number])
        count = 1 if rank < num_one else int(rng.integers(2, 4)) if rank < num_one + num_several else 0
        record = _record(rng, f"{number:05d}", media_root, count)
        records.append({"id": f"demo-{number:05d}", **record})
    train_path, texts = write_records(media_root, records)
    model_dir = out / "model"
    _write_model(model_dir, texts, TinyModelDims() if dims is None else dims, seed, with_weights)
    return DemoPaths(model_dir, train_path, media_root)


def _record(rng: np.random.Generator, stem: str, root: Path, num_recordings: int) -> dict[str, Any]:
    if not num_recordings:
        return {"conversations": chat_turns([chat_text(rng, int(rng.integers(20, 200)))])}
    heard = []
    paths = [f"audio/{stem}-{k}.wav" for k in range(num_recordings)]
    for path in paths:
        heard.append(_write_tones(rng, root / path))
    subject = "recording" if num_recordings == 1 else "recordings"
    question = "<audio>\n" * num_recordings + question_text(rng, subject)
    answer = f"There is {'; then '.join(heard)}. {answer_text(rng)}"
    return {
        "audio": paths[0] if num_recordings == 1 else paths,
        "conversations": chat_turns([(question, answer)]),
    }


def _write_tones(rng: np.random.Generator, path: Path) -> str:
    """Write a recording of one to four tones as 16-bit WAV; says what is heard."""
    rate_hz = int(rng.choice(_RATES_HZ))
    duration_s = _SHORTEST_S * math.exp(math.log(_LONGEST_S / _SHORTEST_S) * rng.random())
    names = [str(name) for name in rng.choice(list(_PITCHES_HZ), int(rng.integers(1, 5)))]
    tones = [
        _tone(rng.uniform(*_PITCHES_HZ[name]), round(rate_hz * duration_s / len(names)), rate_hz)
        for name in names
    ]
    mono = np.concatenate(tones)
    mono += rng.normal(0.0, 0.003, len(mono))
    channels = [mono] if rng.random() < 0.7 else [mono, 0.5 * mono]
    samples = np.round(np.stack(channels, axis=1) * _FULL_SCALE).clip(-_FULL_SCALE, _FULL_SCALE)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(samples.astype("<i2").tobytes())
    return ", ".join(f"a {name} tone" for name in names)


def _tone(frequency_hz: float, num_samples: int, rate_hz: int) -> npt.NDArray[np.float64]:
    """A sine with short fades, so that tones do not click."""
    time_s = np.arange(num_samples) / rate_hz
    fade = np.minimum(1.0, np.minimum(time_s, time_s[::-1]) / _FADE_S)
    return 0.4 * fade * np.sin(2 * math.pi * frequency_hz * time_s)


def _write_model(
    model_dir: Path, texts: list[str], dims: TinyModelDims, seed: int, with_weights: bool
) -> None:
    tokenizer = train_tokenizer(texts, dims.vocab_size - 24, _MEDIA_TOKENS)
    config = tiny_audio_config(dims, tokenizer)
    config.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    WhisperFeatureExtractor(feature_size=_MEL_BINS).save_pretrained(model_dir)
    if with_weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            Qwen2AudioForConditionalGeneration(config).save_pretrained(model_dir)


def tiny_audio_config(dims: TinyModelDims, tokenizer: PreTrainedTokenizerFast) -> Qwen2AudioConfig:
    """Configuration of the audio demo's model for a tokenizer; windows of 30 s."""
    return Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        audio_config=Qwen2AudioEncoderConfig(
            num_mel_bins=_MEL_BINS,
            d_model=dims.vision_hidden,
            encoder_ffn_dim=dims.vision_intermediate,
            encoder_layers=dims.vision_layers,
            encoder_attention_heads=dims.vision_heads,
        ).to_dict(),
        text_config=tiny_text_config(dims, tokenizer),
        audio_token_index=int(tokenizer.convert_tokens_to_ids(_MEDIA_TOKENS[0])),
    )
