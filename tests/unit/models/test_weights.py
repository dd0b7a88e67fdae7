"""Weights from Hugging Face directories: names, shards, what is missing."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.errors import ModelError
from dflop_ds.families.llava_onevision import FAMILY
from dflop_ds.models import weights
from dflop_ds.models.export import whole_model_shapes
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.weights import Checkpoint, check_weights, load_layers, uninitialised

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


def _save_in_two(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Two files and their index."""
    names = sorted(state)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: state[name] for name in members}, str(folder / file))
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


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
    _save_in_two(tmp_path, _renamed(state, NAMINGS[naming]))
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
def test_everything_that_does_not_fit_is_named_at_once(naming: str, tmp_path: Path, config, state) -> None:
    missing = ["model.language_model.layers.1.mlp.up_proj.weight", "model.image_newline"]
    other = "model.multi_modal_projector.linear_1.weight"
    content = {key: value for key, value in state.items() if key not in missing}
    content[other] = torch.zeros(8, 9)
    content["model.vision_tower.encoder.layers.7.mlp.fc1.bias"] = torch.zeros(3)
    save_file(_renamed(content, NAMINGS[naming]), str(tmp_path / "model.safetensors"))
    layers = _built(config)
    before = [parameter.clone() for layer in layers for parameter in layer.parameters()]
    source = Checkpoint(tmp_path, FAMILY.published_names)
    with pytest.raises(ModelError) as raised:
        check_weights(layers, source, also_known=whole_model_shapes(config))
    for name in missing:
        assert f"{name} (missing)" in str(raised.value)
    assert f"{other} (shape (8, 9) instead of (8, 8))" in str(raised.value)
    assert "encoder.layers.7.mlp.fc1.bias (unexpected)" in str(raised.value)
    assert str(raised.value).count("(missing)") == 2
    assert str(raised.value).count("(unexpected)") == 1
    with pytest.raises(ModelError, match=r"image_newline \(missing\)"):
        load_layers(layers, source)
    with pytest.raises(ModelError, match=r"image_newline \(missing\)"):
        load_layers(layers, content)
    after = [parameter for layer in layers for parameter in layer.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_named(dtype: torch.dtype, tmp_path: Path, config, state) -> None:
    """Their values without their scales would train a wrong model."""
    name = "model.multi_modal_projector.linear_1.weight"
    save_file({**state, name: state[name].to(dtype)}, str(tmp_path / "model.safetensors"))
    found = {torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}[dtype]
    with pytest.raises(ModelError, match=rf"linear_1\.weight \({found} instead of a floating-point type"):
        load_layers(_built(config), Checkpoint(tmp_path))


def _cut(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _point(folder: Path) -> None:
    """A file that Git LFS has not downloaded."""
    (folder / "model-00002-of-00002.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def _swap(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    files = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": dict.fromkeys(files, "model-00002-of-00002.safetensors")}))


DAMAGES = {
    "missing": (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "found no model-"),
    "cut": (_cut, "model-00002-of-00002.safetensors must be a whole safetensors file"),
    "pointer": (_point, "model-00002-of-00002.safetensors must be a whole safetensors file"),
    "wrong file": (_swap, "with the weights that its index names"),
    "no JSON": (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "must map weights"),
    "no map": (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "must map weights"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_directories_name_the_file(damage: str, tmp_path: Path, config, state) -> None:
    _save_in_two(tmp_path, state)
    spoil, message = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message):
        check_weights(_built(config), Checkpoint(tmp_path))


def test_unexpected_weights_alone_are_a_warning(tmp_path: Path, config, state, caplog) -> None:
    save_file({**state, "stray.weight": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    check_weights(_built(config), Checkpoint(tmp_path), also_known=whole_model_shapes(config))
    assert "no place for: stray.weight" in caplog.text
    # Blocks that the projector does not read are weights of the model all the same.
    assert caplog.text.count("layers") == 0


def test_layers_can_be_built_without_random_numbers(config, state) -> None:
    with uninitialised():
        rng = torch.get_rng_state()
        layers = _built(config)
        assert torch.equal(rng, torch.get_rng_state())
    load_layers(layers, state)
    _assert_loaded(layers, state)
    assert torch.equal(layers[0].embeddings.position_ids, torch.arange(4)[None])


def test_one_tensor_at_a_time_and_one_open_file(tmp_path: Path, config, state, monkeypatch) -> None:
    names = sorted(state)
    shards = {f"model-0000{k}-of-00003.safetensors": names[k::3] for k in range(3)}
    for file, members in shards.items():
        save_file({name: state[name] for name in members}, str(tmp_path / file))
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened, most_open, alive, most_alive = [], [0], weakref.WeakSet(), [0]

    class Counting:
        def __init__(self, path: str, framework: str) -> None:
            self.file = safe_open(path, framework=framework)

        def __enter__(self):
            opened.append(self)
            most_open[0] = max(most_open[0], len(opened))
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            opened.remove(self)
            self.file.__exit__(*error)

        def get_slice(self, name: str):
            return self.inner.get_slice(name)

        def get_tensor(self, name: str):
            value = self.inner.get_tensor(name)
            most_alive[0] = max(most_alive[0], 1 + len(alive))
            alive.add(value)
            return value

    monkeypatch.setattr(weights, "safe_open", Counting)
    layers = _built(config)
    load_layers(layers, Checkpoint(tmp_path))
    _assert_loaded(layers, state)
    assert most_open == [1]
    assert most_alive[0] <= 2  # the one that is read while the last one is still named


def test_a_directory_without_weights(tmp_path: Path) -> None:
    assert not Checkpoint.exists(tmp_path)
    with pytest.raises(ModelError, match="found neither"):
        Checkpoint(tmp_path)
    assert not Checkpoint.exists(tmp_path / "absent")


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_directory_with_weights(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    assert Checkpoint.exists(tmp_path)
