"""Patterns against the names that ``transformers`` gives the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dflop_ds.config import FinetuneConfig, ParamGroup
from dflop_ds.data.demo import DemoPaths
from dflop_ds.errors import ConfigError
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.selection import (
    NamedWeight,
    build_without_memory,
    module_paths,
    named_weights,
    select,
)
from dflop_ds.runtime.finetune import plan_finetuning


@pytest.fixture(scope="module")
def plans(tiny_demo: DemoPaths) -> Any:
    return pipeline_layers(AutoConfig.from_pretrained(tiny_demo.model_dir))


@pytest.fixture(scope="module")
def weights(plans: Any) -> list[NamedWeight]:
    return named_weights(plans, build_without_memory(plans))


def test_modules_are_named_by_kind_and_number(plans: Any) -> None:
    assert module_paths(plans) == [
        "encoder.embed",
        "encoder.layers.0",
        "encoder.layers.1",
        "projector",
        "llm.embed",
        "llm.layers.0",
        "llm.layers.1",
        "llm.norm",
        "llm.head",
    ]


def test_names_and_sizes_are_those_of_transformers(weights: list[NamedWeight], tiny_demo: DemoPaths) -> None:
    from transformers import LlavaOnevisionForConditionalGeneration

    model = LlavaOnevisionForConditionalGeneration.from_pretrained(Path(tiny_demo.model_dir))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    used = {weight.name: weight.num_values for weight in weights}
    assert used == {name: sizes[name] for name in used}
    unused = set(sizes) - set(used)
    assert all("vision_tower.post_layernorm" in name or "vision_tower.head" in name for name in unused)


@pytest.mark.parametrize(
    ("pattern", "start", "end"),
    [
        ("encoder", "model.vision_tower.", ""),
        ("encoder.layers", "model.vision_tower.encoder.layers.", ""),
        ("encoder.layers.1", "model.vision_tower.encoder.layers.1.", ""),
        ("encoder.layers.[1-9]", "model.vision_tower.encoder.layers.1.", ""),
        ("llm.embed", "model.language_model.embed_tokens.", ""),
        ("llm.head", "lm_head.", ""),
        ("*.bias", "", ".bias"),
        ("model.language_model.layers.0", "model.language_model.layers.0.", ""),
    ],
)
def test_a_pattern_selects(pattern: str, start: str, end: str, weights: list[NamedWeight]) -> None:
    expected = {w.name for w in weights if w.name.startswith(start) and w.name.endswith(end)}
    assert select([pattern], weights, "freeze") == expected
    assert expected


def test_the_projector_includes_the_newline(weights: list[NamedWeight]) -> None:
    found = select(["projector"], weights, "freeze")
    assert "model.image_newline" in found
    assert all("projector" in name or name == "model.image_newline" for name in found)


def test_unknown_patterns_are_all_named_with_what_exists(weights: list[NamedWeight]) -> None:
    with pytest.raises(ConfigError) as caught:
        select(["encodr", "llm", "llm.layers.7"], weights, "dflop.finetune.freeze")
    text = str(caught.value)
    assert "'encodr' matches none. Did you mean 'encoder'?" in text
    assert "'llm.layers.7'" in text
    assert "llm.embed" in text
    assert text.count("dflop.finetune.freeze") == 2


def test_tied_weights_are_frozen_under_either_name(tiny_demo: DemoPaths) -> None:
    config = AutoConfig.from_pretrained(tiny_demo.model_dir)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    plans = pipeline_layers(config)
    for pattern in ("llm.embed", "llm.head"):
        found = plan_finetuning(FinetuneConfig(freeze=[pattern]), plans)
        assert found is not None
        assert found.frozen == {"model.language_model.embed_tokens.weight"}
        assert (found.layers[4].trainable_share, found.layers[-1].trainable_share) == (0, 0)


def test_layers_know_what_is_trained_below(plans: Any) -> None:
    found = plan_finetuning(FinetuneConfig(freeze=["encoder.embed", "encoder.layers.0", "llm"]), plans)
    assert found is not None
    states = [(layer.trainable_share, layer.trainable_below, layer.has_backward) for layer in found.layers]
    assert states == [
        (0, False, False),
        (0, False, False),
        (1, False, True),
        (1, True, True),
        *[(0, True, True)] * 5,
    ]


def test_nothing_left_to_train_is_refused(plans: Any) -> None:
    with pytest.raises(ConfigError, match="something must be left to train"):
        plan_finetuning(FinetuneConfig(freeze=["*"]), plans)


def test_groups_are_resolved_in_order(plans: Any) -> None:
    groups = [ParamGroup(match=["encoder"], lr=1e-5), ParamGroup(match=["*.bias"], weight_decay=0.0)]
    found = plan_finetuning(FinetuneConfig(param_groups=groups), plans)
    assert found is not None
    assert [own for _, own in found.groups] == [{"lr": 1e-5}, {"weight_decay": 0.0}]
    with pytest.raises(ConfigError, match=r"param_groups\[0\].match.*'decoder'"):
        plan_finetuning(FinetuneConfig(param_groups=[ParamGroup(match=["decoder"], lr=1.0)]), plans)
    assert plan_finetuning(FinetuneConfig(), plans) is None


@pytest.mark.parametrize(
    "block",
    [
        {"param_groups": [ParamGroup(match=["projector"], lr=1.0)], "freeze": ["projector"]},
        {"param_groups": [ParamGroup(match=["*"], lr=1.0), ParamGroup(match=["*.bias"], lr=2.0)]},
    ],
)
def test_a_group_that_would_get_nothing_is_named(block: dict[str, Any], plans: Any) -> None:
    number = len(block["param_groups"]) - 1
    with pytest.raises(ConfigError, match=rf"param_groups\[{number}\] must have a parameter of its own"):
        plan_finetuning(FinetuneConfig(**block), plans)
