"""Formulas against transformers and against hand-made numbers."""

import numpy as np
import pytest
import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.planning.analytic import (
    analytic_layer_model,
    analytic_memory_model,
    model_layers,
    parameter_counts,
)
from dflop_ds.planning.hardware import PRESETS
from tests.support.planning import DIMS


@pytest.fixture(scope="module")
def hf_model():
    vision, llm = DIMS.vision, DIMS.llm
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=vision.hidden,
            intermediate_size=vision.intermediate,
            num_attention_heads=vision.num_heads,
            num_hidden_layers=vision.num_layers,
            image_size=vision.tile_px,
            patch_size=vision.patch_px,
            vision_use_head=False,
        ),
        text_config=Qwen2Config(
            hidden_size=llm.hidden,
            intermediate_size=llm.intermediate,
            num_attention_heads=llm.num_heads,
            num_key_value_heads=llm.num_kv_heads,
            num_hidden_layers=llm.num_layers,
            vocab_size=llm.vocab,
        ),
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlavaOnevisionForConditionalGeneration(config)


def test_parameters_are_those_of_the_transformers_model(hf_model):
    def size(module):
        return sum(parameter.numel() for parameter in module.parameters())

    counts, model = parameter_counts(DIMS), hf_model.model
    tower = getattr(model.vision_tower, "vision_model", model.vision_tower)
    assert counts["vision_embed"] == size(tower.embeddings)
    assert counts["vision_block"] == size(tower.encoder.layers[0])
    assert counts["projector"] == size(model.multi_modal_projector) + model.image_newline.numel()
    assert counts["token_embed"] == size(model.language_model.embed_tokens)
    assert counts["decoder_block"] == size(model.language_model.layers[0])
    assert counts["norm"] == size(model.language_model.norm)
    assert counts["head"] == size(hf_model.lm_head)


def test_layers_are_in_pipeline_order():
    assert model_layers(DIMS) == [
        *["vision_embed", "vision_block", "vision_block", "vision_block", "projector", "token_embed"],
        *["decoder_block"] * 4,
        *["norm", "head"],
    ]


def test_head_time_is_its_flops_over_the_reached_peak():
    hardware = PRESETS["a100-80g"]
    features = MicrobatchFeatures(*(np.array([float(v)]) for v in (0, 0, 1000, 1000**2, 1, 600)))
    forward_s, backward_s = analytic_layer_model(DIMS, hardware, "bfloat16").predict("head", features)
    flops = 2 * 1024 * 32000 * 600
    copied = 2 * 1024 * 2 * 1000
    assert forward_s[0] == pytest.approx(1e-4 + flops / (312e12 * 0.52) + copied / 2.039e12)
    assert backward_s[0] == pytest.approx(1e-4 + 2 * (flops / (312e12 * 0.52) + copied / 2.039e12))


def test_decoder_keeps_the_tensors_that_autograd_needs():
    # 2 norms x (input, output); q, k, v before and after rotation, attention output; 4 of the MLP.
    values = 4 * 1024 + 3 * (16 + 8) * 64 + 4 * 4096
    features = MicrobatchFeatures(*(np.array([float(v)]) for v in (0, 0, 1000, 1000**2, 1, 600)))
    kept = analytic_memory_model(DIMS, 2).activation_bytes("decoder_block", features)
    assert kept[0] == pytest.approx(1000 * values * 2, rel=1e-6)
