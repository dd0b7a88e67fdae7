"""The names and signatures of transformers from which the pipeline layers are made."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlavaOnevisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipVisionEmbeddings

PROBE = "dflop_contract_probe"
TEXT = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
DECODERS = {
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding),
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
}


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """Calls of an attention function that is registered for the test."""
    found: list[dict[str, Any]] = []

    def probe(module, query, key, value, attention_mask, **kwargs):
        found.append(
            {"module": module, "shapes": (query.shape, key.shape, value.shape), "mask": attention_mask}
            | kwargs
        )
        return query.transpose(1, 2), None

    AttentionInterface.register(PROBE, probe)
    yield found
    AttentionInterface._global_mapping.pop(PROBE)


def test_encoder_layer_takes_hidden_states_and_mask() -> None:
    names = list(inspect.signature(SiglipEncoderLayer.forward).parameters)
    assert names[:3] == ["self", "hidden_states", "attention_mask"]


def test_encoder_layer_returns_one_tensor_and_attends_without_a_mask(calls) -> None:
    config = SiglipVisionConfig(**VISION)
    config._attn_implementation = PROBE
    output = SiglipEncoderLayer(config)(torch.randn(3, 5, 8), None)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (3, 5, 8)
    (call,) = calls
    assert call["shapes"] == ((3, 2, 5, 4),) * 3
    assert call["mask"] is None
    assert not call.get("is_causal", call["module"].is_causal)
    assert call["scaling"] == pytest.approx(4**-0.5)
    assert call["dropout"] == 0.0


def test_vision_embeddings_take_pixels_alone() -> None:
    embeddings = SiglipVisionEmbeddings(SiglipVisionConfig(**VISION))
    assert embeddings(torch.randn(2, 3, 8, 8)).shape == (2, 4, 8)
    assert embeddings(torch.randn(0, 3, 8, 8)).shape == (0, 4, 8)


@pytest.mark.parametrize("family", DECODERS)
def test_decoder_layer_hands_unknown_arguments_to_the_attention(family: str, calls) -> None:
    config_class, layer_class, _, rotary_class = DECODERS[family]
    config = config_class(**TEXT)
    config._attn_implementation = PROBE
    layer = layer_class(config, 1)
    states = torch.randn(1, 5, 8)
    cosine_sine = rotary_class(config)(states, torch.tensor([[0, 1, 0, 1, 2]]))
    output = layer(states, attention_mask=None, position_embeddings=cosine_sine, segment_lengths=(2, 3))
    assert isinstance(output, torch.Tensor)
    assert output.shape == (1, 5, 8)
    (call,) = calls
    assert call["segment_lengths"] == (2, 3)
    assert call["shapes"] == ((1, 4, 5, 2), (1, 2, 5, 2), (1, 2, 5, 2)), "grouped heads are not repeated"
    assert call["mask"] is None
    assert call.get("is_causal") is None
    assert call["module"].is_causal
    assert call["module"].num_key_value_groups == 2
    assert call["scaling"] == pytest.approx(2**-0.5)


@pytest.mark.parametrize("family", DECODERS)
def test_rotary_embedding_by_hand(family: str) -> None:
    config_class, _, _, rotary_class = DECODERS[family]
    config = config_class(**TEXT)
    rotary = rotary_class(config)
    assert list(inspect.signature(rotary_class.forward).parameters)[1:3] == ["x", "position_ids"]
    assert list(rotary.parameters()) == []
    positions = torch.tensor([[0, 1, 0, 7]])
    cosine, sine = rotary(torch.randn(1, 4, 8), positions)
    # Head size 2: one frequency of 1, repeated for both halves.
    angles = positions[0, :, None].float().expand(-1, 2)
    torch.testing.assert_close(cosine[0], angles.cos())
    torch.testing.assert_close(sine[0], angles.sin())
    assert rotary(torch.randn(1, 4, 8, dtype=torch.bfloat16), positions)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("family", DECODERS)
def test_norm_takes_size_and_eps(family: str) -> None:
    norm = DECODERS[family][2](8, eps=0.25)
    states = torch.randn(3, 8)
    expected = states / (states.pow(2).mean(dim=1, keepdim=True) + 0.25).sqrt()
    torch.testing.assert_close(norm(states), expected)


def test_projector_takes_the_whole_configuration() -> None:
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION),
        text_config=Qwen2Config(**{**TEXT, "hidden_size": 16}),
    )
    projector = LlavaOnevisionMultiModalProjector(config)
    features = torch.randn(2, 4, 8)
    hidden = torch.nn.functional.gelu(projector.linear_1(features))
    torch.testing.assert_close(projector(features), projector.linear_2(hidden))
    assert projector(features).shape == (2, 4, 16)


def test_registration_is_seen_by_every_model() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert list(inspect.signature(AttentionInterface.register).parameters) == ["key", "value"]
    assert PROBE not in ALL_ATTENTION_FUNCTIONS
    AttentionInterface.register(PROBE, print)
    try:
        assert ALL_ATTENTION_FUNCTIONS.get_interface(PROBE, max) is print
    finally:
        AttentionInterface._global_mapping.pop(PROBE)


def test_configuration_names() -> None:
    config = LlavaOnevisionConfig(image_token_index=5, video_token_index=6)
    assert (config.image_token_id, config.video_token_id) == (5, 6)
    assert config.vision_config.model_type == "siglip_vision_model"
    assert config.text_config.model_type == "qwen2"
    assert set(config.text_config.layer_types) == {"full_attention"}
    sliding = Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "sliding_attention" in sliding.layer_types
