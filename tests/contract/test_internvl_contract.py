"""What the pipeline layers of InternVL rely on in transformers."""

from __future__ import annotations

import inspect

import torch
from transformers import InternVLConfig
from transformers.models.internvl.modeling_internvl import (
    InternVLMultiModalProjector,
    InternVLVisionEmbeddings,
    InternVLVisionLayer,
)

from benchmarks.parity.internvl import make_config


def test_embeddings_put_the_class_token_first() -> None:
    config = make_config()
    embeddings = InternVLVisionEmbeddings(config.vision_config)
    with torch.no_grad():
        embeddings.cls_token.fill_(3.0)
        found = embeddings(torch.randn(2, 3, 24, 24))
        expected = embeddings.position_embeddings[0, 0] + 3.0
    assert found.shape == (2, 1 + 36, 16)
    torch.testing.assert_close(found[:, 0], expected.expand(2, -1))
    assert embeddings(torch.randn(0, 3, 24, 24)).shape == (0, 37, 16)


def test_a_block_takes_and_returns_hidden_states_alone() -> None:
    config = make_config().vision_config
    config._attn_implementation = "sdpa"
    block = InternVLVisionLayer(config)
    assert list(inspect.signature(block.forward).parameters) == ["hidden_states"]
    assert block(torch.randn(2, 5, 16)).shape == (2, 5, 16)
    assert {"lambda_1", "lambda_2"} < {name for name, _ in block.named_parameters()}


def test_the_projector_takes_shuffled_patches() -> None:
    config = make_config()
    projector = InternVLMultiModalProjector(config)
    features = torch.randn(2, 9, 64)
    hidden = torch.nn.functional.gelu(projector.linear_1(projector.layer_norm(features)))
    torch.testing.assert_close(projector(features), projector.linear_2(hidden))


def test_configuration_names() -> None:
    config = InternVLConfig()
    assert (config.image_token_id, config.downsample_ratio) == (151667, 0.5)
    assert (config.vision_feature_layer, config.vision_feature_select_strategy) == (-1, "default")
    assert list(config.vision_config.image_size) == [448, 448]
    assert config.vision_config.model_type == "internvl_vision"
    assert config.text_config.model_type == "qwen2"
