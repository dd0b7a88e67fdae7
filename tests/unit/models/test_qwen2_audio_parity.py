"""Qwen2-Audio from waveforms: the silence behind a recording, which is left out, changes nothing.

The reference gets whole windows from its own feature extractor.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from dflop_ds.data.layout import PackedLayout
from dflop_ds.data.processors.qwen2_audio import Qwen2AudioProcessor
from dflop_ds.families.qwen2_audio import Qwen2AudioRule
from dflop_ds.models.qwen2_audio import pipeline_layers
from dflop_ds.models.weights import load_layers

AUDIO_ID, VOCAB = 99, 100
TOLERANCE = 1e-4


def make_config(window_s: int) -> Qwen2AudioConfig:
    return Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(
            d_model=16,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=50 * window_s,
        ).to_dict(),
        text_config=Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ).to_dict(),
        audio_token_index=AUDIO_ID,
    )


class Sample:
    """Random tokens around random recordings."""

    def __init__(self, config: Qwen2AudioConfig, seed: int, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        rule = Qwen2AudioRule.from_config(config.to_dict())
        self.extractor = WhisperFeatureExtractor(
            feature_size=rule.num_mel_bins, chunk_length=rule.max_audio_samples // 16_000
        )
        self.recordings = [rng.normal(0, 0.1, length).astype(np.float32) for length in lengths]
        self.media = tuple(rule.audio(length) for length in lengths)
        self.rows = Qwen2AudioProcessor(self.extractor, rule).rows(self.media, self.recordings)
        ids = [torch.randint(0, 90, (3 + seed % 5,), generator=generator)]
        for item in self.media:
            ids += [torch.full((item.num_tokens,), AUDIO_ID), torch.randint(0, 90, (2,), generator=generator)]
        self.input_ids = torch.cat(ids)

    def hugging_face_logits(self, model: Qwen2AudioForConditionalGeneration) -> torch.Tensor:
        inputs = {"input_ids": self.input_ids[None], "attention_mask": torch.ones_like(self.input_ids)[None]}
        if self.recordings:
            features = self.extractor(
                self.recordings, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt"
            )
            inputs["input_features"] = features["input_features"]
            inputs["feature_attention_mask"] = features["attention_mask"]
        return model(**inputs).logits[0]


def pipeline_logits(layers: list[torch.nn.Module], samples: list[Sample]) -> torch.Tensor:
    ids = torch.cat([sample.input_ids for sample in samples])
    layout = PackedLayout(
        tag=0,
        segment_lengths=tuple(len(sample.input_ids) for sample in samples),
        media=tuple(item for sample in samples for item in sample.media),
        input_ids=ids,
        logit_positions=torch.arange(len(ids)),
    )
    rows = [row for sample in samples for row in sample.rows]
    carry = (torch.cat([torch.empty(0, 8), *rows]), layout.encode())
    for layer in layers:
        carry = layer(carry)
    return carry


def build(config: Qwen2AudioConfig):
    torch.manual_seed(0)
    reference = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.2)
    layers = [plan.build() for plan in pipeline_layers(config)]
    load_layers(layers, reference.state_dict())
    return reference, layers


CASES = {
    "short": (1, [(12_345,)]),
    "longer_than_the_window": (30, [(480_001,)]),
    "one_without_tokens_among_several": (1, [(5_000, 161, 8_000)]),
    "packed": (1, [(12_345,), (), (7_000, 161, 16_001), (160,), (), (3_000,)]),
}
"""Seconds of a window, and samples at 16 kHz of the recordings of every packed sample."""


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    window_s, lengths = CASES[case]
    config = make_config(window_s)
    reference, layers = build(config)
    samples = [Sample(config, seed, recordings) for seed, recordings in enumerate(lengths)]
    expected = torch.cat([sample.hugging_face_logits(reference) for sample in samples])
    found = pipeline_logits(layers, samples)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= TOLERANCE
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(upstream)
    found.backward(upstream)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    checked = set()
    for layer in layers:
        for local_name, parameter in layer.named_parameters():
            name = layer.hf_name(local_name)
            checked.add(name)
            assert parameter.requires_grad == reference.get_parameter(name).requires_grad
            if not parameter.requires_grad:
                continue
            target = torch.zeros_like(parameter) if wanted[name] is None else wanted[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert (gradient - target).abs().max() <= TOLERANCE * target.abs().max().clamp(min=1e-6), name
    assert checked == set(wanted)
