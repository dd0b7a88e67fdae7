"""What rule, processor and pipeline layers of Qwen2-Audio rely on in transformers."""

from __future__ import annotations

import inspect

import torch
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_audio.modeling_qwen2_audio import (
    Qwen2AudioEncoderLayer,
    Qwen2AudioMultiModalProjector,
)
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

from benchmarks.parity.qwen2_audio import make_config


def test_the_feature_extractor_names_what_the_rule_assumes() -> None:
    extractor = WhisperFeatureExtractor(feature_size=128)
    assert (extractor.sampling_rate, extractor.hop_length, extractor.feature_size) == (16_000, 160, 128)
    assert (extractor.n_samples, extractor.nb_max_frames) == (480_000, 3000)


def test_a_block_passes_keywords_on_to_attention() -> None:
    config = make_config().audio_config
    config._attn_implementation = "sdpa"
    block = Qwen2AudioEncoderLayer(config)
    parameters = inspect.signature(block.forward).parameters
    assert list(parameters) == ["hidden_states", "attention_mask", "kwargs"]
    assert block(torch.randn(2, 5, 16), None).shape == (2, 5, 16)
    assert not block.self_attn.is_causal


def test_the_projector_is_one_layer() -> None:
    projector = Qwen2AudioMultiModalProjector(make_config())
    assert [name for name, _ in projector.named_parameters()] == ["linear.weight", "linear.bias"]


def test_nothing_is_tied_and_the_position_table_is_fixed() -> None:
    model = Qwen2AudioForConditionalGeneration(make_config())
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert fixed == ["model.audio_tower.embed_positions.weight"]


def test_configuration_names() -> None:
    config = Qwen2AudioConfig()
    assert config.audio_token_id == 151646
    assert config.audio_config.model_type == "qwen2_audio_encoder"
    assert (config.audio_config.max_source_positions, config.audio_config.num_mel_bins) == (1500, 128)
    assert config.text_config.model_type == "qwen2"


def test_the_template_numbers_recordings() -> None:
    template = Qwen2AudioProcessor.default_chat_template.fget(None)
    assert "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" in template
