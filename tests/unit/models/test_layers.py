"""Initial weights, names of weights, and the configurations that are refused."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.errors import ModelError
from dflop_ds.models.layers import PipelineLayer, seeded_init
from dflop_ds.models.llava_onevision import num_vision_blocks, pipeline_layers

TEXT = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 2,
    "long_factor": [2.0] * 2,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}


def _config(*, text: Any = None, vision: Any = None, **options: Any) -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False) if vision is None else vision,
        text_config=Qwen2Config(**TEXT) if text is None else text,
        image_token_index=18,
        video_token_index=19,
        **options,
    )


class _Toy(PipelineLayer):
    init_normal = ("image_newline",)

    def __init__(self) -> None:
        super().__init__()
        self.init_constants = {"scale": 0.25}
        self.linear = nn.Linear(300, 400)
        self.norm = nn.LayerNorm(5)
        self.image_newline = nn.Parameter(torch.empty(3000))
        self.scale = nn.Parameter(torch.empty(7))


def test_kinds_of_initial_weights() -> None:
    toy = _Toy()
    nn.init.constant_(toy.norm.weight, 9.0)
    nn.init.constant_(toy.norm.bias, 9.0)
    seeded_init(toy, 1, 0.05)
    assert torch.equal(toy.linear.bias, torch.zeros(400))
    assert torch.equal(toy.norm.weight, torch.ones(5))
    assert torch.equal(toy.norm.bias, torch.zeros(5))
    assert torch.equal(toy.scale, torch.full((7,), 0.25))
    for values, tolerance in ((toy.linear.weight, 0.01), (toy.image_newline, 0.06)):
        assert values.std().item() == pytest.approx(0.05, rel=tolerance)
        assert abs(values.mean().item()) < 4 * 0.05 / values.numel() ** 0.5


def test_initial_weights_depend_on_the_seed_alone() -> None:
    found = []
    for seed, global_seed in ((1, 0), (1, 99), (2, 0)):
        torch.manual_seed(global_seed)
        toy = _Toy()
        seeded_init(toy, seed, 0.02)
        found.append(toy.linear.weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_global_random_state_is_untouched() -> None:
    toy = _Toy()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seeded_init(toy, 1, 0.02)
    assert torch.equal(torch.get_rng_state(), before)


def test_meta_parameters_are_left_alone() -> None:
    with torch.device("meta"):
        toy = _Toy()
    seeded_init(toy, 1, 0.02)
    assert all(parameter.is_meta for parameter in toy.parameters())


def test_layers_are_built_alike_whoever_builds_them() -> None:
    """Weights do not depend on the layers built before; equal layers get different weights."""
    plans = pipeline_layers(_config(), seed=4)
    in_order = [plan.build() for plan in plans]
    torch.manual_seed(123)
    backwards = [plan.build() for plan in reversed(plans)][::-1]
    for first, second in zip(in_order, backwards, strict=True):
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(one, other)
    blocks = [layer for layer in in_order if layer.kind == "decoder_block"]
    assert not torch.equal(blocks[0].block.mlp.up_proj.weight, blocks[1].block.mlp.up_proj.weight)


def test_initializer_range_of_each_part_is_used() -> None:
    config = _config(
        text=Qwen2Config(**{**TEXT, "vocab_size": 4000}, initializer_range=0.3), vision=None, seed=0
    )
    layer = next(plan for plan in pipeline_layers(config) if plan.kind == "token_embed").build()
    assert layer.embed_tokens.weight.std().item() == pytest.approx(0.3, rel=0.03)


def _names(config: LlavaOnevisionConfig) -> list[str]:
    layers: dict[str, PipelineLayer] = {}
    for number, plan in enumerate(pipeline_layers(config)):
        layers.setdefault(plan.tied_key or str(number), plan.build())
    return [layer.hf_name(name) for layer in layers.values() for name, _ in layer.named_parameters()]


def _unused(name: str, first_unused_block: int) -> bool:
    if name.startswith(("model.vision_tower.post_layernorm.", "model.vision_tower.head.")):
        return True
    prefix = "model.vision_tower.encoder.layers."
    return name.startswith(prefix) and int(name[len(prefix) :].split(".")[0]) >= first_unused_block


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, 3),
        ({"text": LlamaConfig(**TEXT)}, 3),
        ({"vision": SiglipVisionConfig(**VISION, vision_use_head=True)}, 3),
        ({"multimodal_projector_bias": False}, 3),
        ({"vision_feature_layer": -2}, 2),
        ({"vision_feature_layer": 1}, 1),
    ],
    ids=["qwen2", "llama", "vision_head", "no_bias", "second_last", "first"],
)
def test_names_are_exactly_those_of_transformers(options: dict[str, Any], num_blocks: int) -> None:
    config = _config(**options)
    reference = LlavaOnevisionForConditionalGeneration(config).state_dict()
    expected = {name for name in reference if not _unused(name, num_blocks)}
    names = _names(config)
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []
    assert set(names) == expected
    assert num_vision_blocks(config) == num_blocks


def test_a_tied_model_has_no_weight_of_its_own_for_the_head() -> None:
    config = _config(text=Qwen2Config(**TEXT, tie_word_embeddings=True), tie_word_embeddings=True)
    parameters = dict(LlavaOnevisionForConditionalGeneration(config).named_parameters())
    assert set(_names(config)) == {name for name in parameters if not _unused(name, 3)}
    assert "lm_head.weight" not in _names(config)


def test_shapes_are_those_of_transformers() -> None:
    config = _config()
    reference = LlavaOnevisionForConditionalGeneration(config).state_dict()
    for plan in pipeline_layers(config):
        layer = plan.build()
        for name, parameter in layer.named_parameters():
            assert parameter.shape == reference[layer.hf_name(name)].shape


def test_an_unknown_local_name_is_an_error() -> None:
    layer = pipeline_layers(_config())[0].build()
    with pytest.raises(KeyError, match="embeddings2"):
        layer.hf_name("embeddings2.weight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vision_feature_layer": [-2, -1]}, r"must be one integer, found \[-2, -1\]"),
        ({"vision_feature_select_strategy": "default"}, r'must be "full", found "default"'),
        (
            {"text": Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=4, max_window_layers=1)},
            "full attention, found a sliding window",
        ),
        (
            {"text": LlamaConfig(**TEXT, rope_parameters=LONGROPE)},
            'rope_type must not be "longrope".*longest sample of a microbatch',
        ),
        ({"text": GemmaConfig(**TEXT)}, r'one of \[.llama., .qwen2.\], found "gemma"'),
        ({"vision": CLIPVisionConfig(**VISION)}, r'"siglip_vision_model", found "clip_vision_model"'),
    ],
    ids=["feature_layers", "select_strategy", "sliding_window", "longrope", "text_model", "vision_model"],
)
def test_refused_configurations_name_the_value(options: dict[str, Any], message: str) -> None:
    config = _config(**options)
    with pytest.raises(ModelError, match=message):
        pipeline_layers(config)


@pytest.mark.parametrize("layer", [4, -5])
def test_a_feature_layer_outside_the_tower_is_refused(layer: int) -> None:
    with pytest.raises(ModelError, match=f"into 3 encoder blocks, found {layer}"):
        pipeline_layers(_config(vision_feature_layer=layer))


def test_the_given_configuration_is_left_unchanged() -> None:
    config = _config()
    before = config.to_dict(), config.text_config._attn_implementation
    pipeline_layers(config, attention="dflop_varlen")
    assert (config.to_dict(), config.text_config._attn_implementation) == before


def test_tying_asked_for_by_the_text_configuration_alone() -> None:
    """Whichever configuration says so: the head is tied where that of transformers is."""
    config = _config(text=Qwen2Config(**TEXT, tie_word_embeddings=True), tie_word_embeddings=False)
    tied = "lm_head.weight" not in _names(config)
    reference = LlavaOnevisionForConditionalGeneration(config)
    assert tied == (reference.lm_head.weight is reference.model.language_model.embed_tokens.weight)
