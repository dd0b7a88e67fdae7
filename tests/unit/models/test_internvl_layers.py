"""InternVL: feature layers, pooling, weights by published names, initial values, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import InternVLForConditionalGeneration, SiglipVisionConfig

from benchmarks.parity.compare import TOLERANCE, Pair
from benchmarks.parity.internvl import make_config, make_variant
from dflop_ds.errors import ModelError
from dflop_ds.families.internvl import FAMILY
from dflop_ds.models.internvl import VisionBlock, pipeline_layers
from dflop_ds.models.weights import Checkpoint, load_layers

PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


@pytest.mark.parametrize(
    "options", [{"feature_layer": -2}, {"feature_layer": 1}, {"use_mean_pooling": False}]
)
def test_other_feature_layers_and_pooling(options: dict[str, Any]) -> None:
    """Without mean pooling the encoder ends with a norm."""
    found = Pair(make_variant("other", make_config(**options))).compare("image and clips")
    assert max(found.logits, found.gradient) <= TOLERANCE


@pytest.mark.parametrize("published", [False, True])
def test_checkpoints_are_read(published: bool, tmp_path: Path) -> None:
    state = InternVLForConditionalGeneration(make_config()).state_dict()
    saved = {}
    for name, value in state.items():
        prefix = next((prefix for prefix in PUBLISHED if published and name.startswith(prefix)), "")
        saved[PUBLISHED.get(prefix, "") + name[len(prefix) :]] = torch.randn(value.shape)
    save_file(saved, str(tmp_path / "model.safetensors"))
    layers = [plan.build() for plan in pipeline_layers(make_config())]
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    found = {layer.hf_name(name): p for layer in layers for name, p in layer.named_parameters()}
    assert found.keys() == state.keys()
    for name, parameter in found.items():
        prefix = next((prefix for prefix in PUBLISHED if published and name.startswith(prefix)), "")
        assert torch.equal(parameter, saved[PUBLISHED.get(prefix, "") + name[len(prefix) :]])


def test_what_save_pretrained_writes_is_read(tmp_path: Path) -> None:
    model = InternVLForConditionalGeneration(make_config(tied=True))
    model.save_pretrained(tmp_path)
    layers = [plan.build() for plan in pipeline_layers(make_config(tied=True))]
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    state = model.state_dict()
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, state[layer.hf_name(name)])


def test_layer_scales_start_at_their_configured_value() -> None:
    plans = pipeline_layers(make_config(layer_scale_init_value=0.375))
    block = next(plan for plan in plans if plan.kind == "vision_block").build()
    assert isinstance(block, VisionBlock)
    for scale in (block.block.lambda_1, block.block.lambda_2):
        assert torch.equal(scale, torch.full_like(scale, 0.375))
    assert torch.equal(block.block.layernorm_before.weight, torch.ones(16))


def test_refused_configurations_name_the_value() -> None:
    config = make_config()
    config.vision_feature_layer = [-2, -1]
    with pytest.raises(ModelError, match=r"must be one integer, found \[-2, -1\]"):
        pipeline_layers(config)
    config = make_config()
    config.vision_config = SiglipVisionConfig()
    with pytest.raises(ModelError, match='"internvl_vision", found "siglip_vision_model"'):
        pipeline_layers(config)


def test_the_given_configuration_is_left_unchanged() -> None:
    config = make_config()
    before = config.to_dict(), config.text_config._attn_implementation
    pipeline_layers(config, attention="dflop_varlen")
    assert (config.to_dict(), config.text_config._attn_implementation) == before
