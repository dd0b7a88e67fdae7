"""Weights from Hugging Face directories: names, shards, what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.errors import ModelError
from dflop_ds.families.llava_onevision import FAMILY
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.weights import Checkpoint, load_layers

# The names of llava-hf/llava-onevision-qwen2-*-ov-hf, longest prefix first.
PUBLISHED = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.language_model.": "language_model.model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
    "lm_head.": "language_model.lm_head.",
}
# What `save_pretrained` of transformers 5 writes.
SAVED = {**PUBLISHED, "model.vision_tower.": "vision_tower."}
NAMINGS = {
    "current": {},
    "published": PUBLISHED,
    "saved": SAVED,
    "nested": {"model.vision_tower.": "model.vision_tower.vision_model."},
}


@pytest.fixture(scope="module")
def config() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            image_size=8,
            patch_size=4,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            vision_use_head=False,
        ),
        text_config=Qwen2Config(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
        image_token_index=18,
        video_token_index=19,
    )


@pytest.fixture(scope="module")
def state(config: LlavaOnevisionConfig) -> dict[str, torch.Tensor]:
    """Weights of the whole model by their current names, every number another one."""
    content = LlavaOnevisionForConditionalGeneration(config).state_dict()
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(value.shape, generator=generator) for name, value in content.items()}


def _renamed(state: dict[str, torch.Tensor], naming: dict[str, str]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, value in state.items():
        prefix = next((prefix for prefix in naming if name.startswith(prefix)), "")
        renamed[naming.get(prefix, "") + name[len(prefix) :]] = value
    assert len(renamed) == len(state)
    return renamed


def _built(config: LlavaOnevisionConfig) -> list:
    return [plan.build() for plan in pipeline_layers(config)]


def _assert_loaded(layers: list, state: dict[str, torch.Tensor]) -> None:
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, state[layer.hf_name(name)]), layer.hf_name(name)


@pytest.mark.parametrize("naming", NAMINGS)
def test_one_file(naming: str, tmp_path: Path, config, state) -> None:
    save_file(_renamed(state, NAMINGS[naming]), str(tmp_path / "model.safetensors"))
    layers = _built(config)
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    _assert_loaded(layers, state)


@pytest.mark.parametrize("naming", ["current", "published"])
def test_shards_with_an_index(naming: str, tmp_path: Path, config, state) -> None:
    renamed = _renamed(state, NAMINGS[naming])
    names = sorted(renamed)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: renamed[name] for name in members}, str(tmp_path / file))
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    layers = _built(config)
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    _assert_loaded(layers, state)


def test_what_save_pretrained_writes_is_read(tmp_path: Path, config) -> None:
    model = LlavaOnevisionForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    layers = _built(config)
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    _assert_loaded(layers, model.state_dict())


def test_a_state_dict_serves_as_well(config, state) -> None:
    layers = _built(config)
    load_layers(layers, state)
    _assert_loaded(layers, state)


def test_other_precision_is_converted(tmp_path: Path, config, state) -> None:
    half = {name: value.to(torch.bfloat16) for name, value in state.items()}
    save_file(half, str(tmp_path / "model.safetensors"))
    layers = _built(config)
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    assert all(p.dtype == torch.float32 for layer in layers for p in layer.parameters())
    _assert_loaded(layers, {name: value.float() for name, value in half.items()})


@pytest.mark.parametrize("naming", ["current", "published"])
def test_a_missing_weight_is_named(naming: str, tmp_path: Path, config, state) -> None:
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    rest = {key: value for key, value in state.items() if key != name}
    save_file(_renamed(rest, NAMINGS[naming]), str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=rf"must hold the weight {name}.*language_model\.model\.layers\.1"):
        load_layers(_built(config), Checkpoint(tmp_path, FAMILY.published_names))


def test_another_shape_is_named(tmp_path: Path, config, state) -> None:
    name = "model.multi_modal_projector.linear_1.weight"
    save_file({**state, name: torch.zeros(8, 9)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match=rf"{name} must have shape \(8, 8\), found \(8, 9\)"):
        load_layers(_built(config), Checkpoint(tmp_path, FAMILY.published_names))


def test_a_directory_without_weights(tmp_path: Path) -> None:
    assert not Checkpoint.exists(tmp_path)
    with pytest.raises(ModelError, match="found neither"):
        Checkpoint(tmp_path)
    assert not Checkpoint.exists(tmp_path / "absent")


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_directory_with_weights(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    assert Checkpoint.exists(tmp_path)
