"""Exports that ``from_pretrained`` reads: nothing missing, nothing unexpected, the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.errors import ModelError
from dflop_ds.families.llava_onevision import FAMILY
from dflop_ds.models.export import HuggingFaceWriter, cut_into_shards
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.weights import Checkpoint, load_layers, named_weights

Weights = dict[str, torch.Tensor]


def make_config(tied: bool, feature_layer: int = -2) -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        architectures=["LlavaOnevisionForConditionalGeneration"],
        vision_config=SiglipVisionConfig(
            image_size=8, patch_size=4, hidden_size=8, intermediate_size=12, num_hidden_layers=3,
            num_attention_heads=2, vision_use_head=False,
        ),
        text_config=Qwen2Config(
            vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        ),
        image_token_index=18,
        video_token_index=19,
        tie_word_embeddings=tied,
        vision_feature_layer=feature_layer,
        image_grid_pinpoints=[[8, 8]],
    )  # fmt: skip


def trained_stages(config: LlavaOnevisionConfig) -> list[Weights]:
    """Weights of two stages, none of which is what it was at first; tied ones occur in both."""
    layers = [plan.build() for plan in pipeline_layers(config)]
    generator = torch.Generator().manual_seed(5)
    state: Weights = {}
    stages: list[Weights] = [{}, {}]
    for number, layer in enumerate(layers):
        for name, parameter in named_weights(layer).items():
            state.setdefault(name, torch.randn(parameter.shape, generator=generator))
            stages[number >= 6][name] = state[name]
    return stages


def export(
    source: Path, out: Path, config: Any, stages: list[Weights], dtype: torch.dtype, max_bytes: int
) -> None:
    out.mkdir()
    shapes = [{name: tuple(value.shape) for name, value in stage.items()} for stage in stages]
    for stage, weights in enumerate(stages):  # as every rank does on its own
        options = {"published_names": FAMILY.published_names, "max_shard_bytes": max_bytes}
        writer = HuggingFaceWriter(out, source, config, shapes, dtype, **options)
        writer.write_stage(stage, weights.__getitem__)
    writer.write_rest()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_what_was_exported(
    tied: bool, with_weights: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = make_config(tied)
    source, out = tmp_path / "source", tmp_path / "out"
    first = LlavaOnevisionForConditionalGeneration(config).eval()
    config.save_pretrained(source)
    if with_weights:
        first.save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    stages = trained_stages(config)
    trained = {**stages[0], **stages[1]}
    export(source, out, config, stages, dtype, max_bytes=2000)

    assert (out / "tokenizer_config.json").read_text() == "{}"
    read, info = LlavaOnevisionForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
    assert read.dtype == dtype
    state = read.state_dict()
    for name, value in trained.items():
        assert torch.equal(state[name], value.to(dtype)), name
    if tied:
        assert torch.equal(state["lm_head.weight"], state["model.language_model.embed_tokens.weight"])
    unused = "model.vision_tower.encoder.layers.2.mlp.fc1.weight"
    assert unused not in trained
    if with_weights:
        assert torch.equal(state[unused], first.state_dict()[unused].to(dtype))

    first.load_state_dict(trained, strict=False)
    first.save_pretrained(tmp_path / "reference")
    reference = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path / "reference", dtype=dtype)
    inputs = {
        "input_ids": torch.tensor([[1, *[18] * 10, 2]]),
        "pixel_values": torch.randn(1, 2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),
        "image_sizes": torch.tensor([[8, 8]]),
    }
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    assert torch.equal(read.eval()(**inputs).logits, reference.eval()(**inputs).logits)

    again = [plan.build() for plan in pipeline_layers(config)]
    load_layers(again, Checkpoint(out, FAMILY.published_names))
    for layer in again:
        for name, parameter in named_weights(layer).items():
            assert torch.equal(parameter, trained[name].to(dtype).float())


def test_files_are_of_one_stage_and_bounded(tmp_path: Path) -> None:
    config = make_config(tied=True)
    config.save_pretrained(tmp_path / "source")
    stages = trained_stages(config)
    export(tmp_path / "source", tmp_path / "out", config, stages, torch.float32, max_bytes=1500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    total = 0
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sizes = [value.numel() * value.element_size() for value in tensors.values()]
        assert sum(sizes) <= 1500 or len(sizes) == 1
        total += sum(sizes)
        second = set(tensors) & (set(stages[1]) - set(stages[0]))
        assert len(second) in (0, len(tensors))
    assert index["metadata"]["total_size"] == total


def test_cuts() -> None:
    shards = cut_into_shards([{"a": 4, "b": 4, "c": 9, "d": 1}, {"e": 1}], max_bytes=8)
    assert [(shard.stage, shard.names) for shard in shards] == [
        (0, ("a", "b")),
        (0, ("c",)),
        (0, ("d",)),
        (1, ("e",)),
    ]
    assert shards[1].file == "model-00002-of-00004.safetensors"


def test_weights_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    config = make_config(tied=False)
    config.save_pretrained(tmp_path)
    name = "model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    with pytest.raises(ModelError, match=r"lora_A\.weight\. Export adapters in their own format"):
        HuggingFaceWriter(tmp_path, tmp_path, config, [{name: (2, 2)}], torch.float32)


def test_everything_but_weights_is_copied(tmp_path: Path) -> None:
    """What belongs to tokenizer, processor and generation, chat templates in their folder too."""
    config, source, out = make_config(tied=False), tmp_path / "source", tmp_path / "out"
    config.save_pretrained(source)
    (source / "additional_chat_templates").mkdir()
    kept = ["generation_config.json", "merges.txt", "chat_template.jinja"]
    kept.append("additional_chat_templates/tool.jinja")
    for name in [*kept, "pytorch_model.bin", "optimizer.pt"]:
        (source / name).write_text(name)
    export(source, out, config, trained_stages(config), torch.float32, max_bytes=10**9)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    own = {"config.json", "model.safetensors.index.json"}
    assert {name for name in files if not name.endswith(".safetensors")} == {*kept, *own}
    assert all((out / name).read_text() == name for name in kept)
