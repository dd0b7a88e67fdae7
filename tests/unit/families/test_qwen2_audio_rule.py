"""The audio rule against the processor and the model of transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoder,
    Qwen2AudioEncoderConfig,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families.qwen2_audio import Qwen2AudioRule

AUDIO_ID = 1
EDGES = [1, 159, 160, 161, 319, 320, 321, 640, 641, 479_679, 479_680, 479_999, 480_000, 480_001, 700_000]


def _processor(window_s: int) -> Qwen2AudioProcessor:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<|AUDIO|>": AUDIO_ID}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=["<|AUDIO|>"])
    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=2, chunk_length=window_s), fast)


def _lengths() -> list[int]:
    rng = np.random.default_rng(5)
    return EDGES + [int(n) for n in np.exp(rng.uniform(np.log(100), np.log(600_000), 290))]


def test_tokens_equal_those_of_the_processor() -> None:
    processor, rule = _processor(30), Qwen2AudioRule.from_config(Qwen2AudioConfig().to_dict())
    lengths = _lengths()
    assert len(lengths) >= 300
    for length in lengths:
        audio = np.zeros(length, dtype=np.float32)
        out = processor(text="<|AUDIO|>", audio=[audio], sampling_rate=16_000, return_tensors="pt")
        num_frames = int(out["feature_attention_mask"].sum())
        assert rule.audio(length).num_inputs == (num_frames + 1) // 2, length
        assert rule.audio(length).num_tokens == int((out["input_ids"] == AUDIO_ID).sum()), length
    assert rule.max_audio_samples == processor.feature_extractor.n_samples
    assert rule.window_frames == processor.feature_extractor.nb_max_frames


@pytest.mark.parametrize("positions", [50, 3])
def test_positions_and_tokens_equal_those_of_the_model(positions: int) -> None:
    config = Qwen2AudioEncoderConfig(
        d_model=4,
        encoder_layers=1,
        encoder_attention_heads=1,
        encoder_ffn_dim=4,
        num_mel_bins=2,
        max_source_positions=positions,
    )
    rule = Qwen2AudioRule.from_config({"audio_config": config.to_dict(), "audio_token_index": AUDIO_ID})
    encoder = Qwen2AudioEncoder(config)
    for length in range(1, rule.max_audio_samples + 500, 53):
        frames = torch.tensor([math.ceil(min(length, rule.max_audio_samples) / 160)])
        positions_of_model, tokens_of_model = encoder._get_feat_extract_output_lengths(frames)
        assert rule.audio(length).num_inputs == int(positions_of_model)
        assert rule.audio(length).num_tokens == int(tokens_of_model)


def test_config_is_read_and_checked() -> None:
    rule = Qwen2AudioRule.from_config({"audio_token_index": 7, "audio_config": {"max_source_positions": 100}})
    assert (rule.audio_token_id, rule.max_audio_samples, rule.num_mel_bins) == (7, 32_000, 128)
    with pytest.raises(ConfigError, match="qwen2_audio_encoder"):
        Qwen2AudioRule.from_config({"audio_config": {"model_type": "whisper"}})
    with pytest.raises(ConfigError, match="max_source_positions"):
        Qwen2AudioRule.from_config({"audio_config": {"max_source_positions": 1}})


def test_a_recording_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="at least 1 sample"):
        Qwen2AudioRule.from_config({}).audio(0)
