"""Adapters in pipeline layers: where they are put, how they begin, what is named when they cannot be."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dflop_ds.config import FinetuneConfig, LoraSettings
from dflop_ds.data.demo import DemoPaths
from dflop_ds.errors import ConfigError
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.lora import is_adapter, merged
from dflop_ds.runtime.finetune import apply, plan_finetuning

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def plans(tiny_demo: DemoPaths) -> Any:
    return pipeline_layers(AutoConfig.from_pretrained(tiny_demo.model_dir))


def lora(*match: str, **more: Any) -> FinetuneConfig:
    return FinetuneConfig(lora=LoraSettings(match=list(match), rank=4, **more))


def test_every_linear_layer_but_the_head_has_one(plans: Any) -> None:
    found = plan_finetuning(lora("llm"), plans)
    assert found is not None
    assert found.adapters is not None
    projections = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    assert found.adapters.weights == {
        f"model.language_model.layers.{layer}.{part}.{name}_proj.weight"
        for layer in (0, 1)
        for part, names in projections.items()
        for name in names
    }
    shares = [layer.trainable_share for layer in found.layers]
    assert [share > 0 for share in shares] == [False] * 5 + [True, True, False, False]
    assert max(shares) < 0.5
    assert not any(is_adapter(name) for name in found.frozen)


def test_adapters_begin_the_same_wherever_a_layer_is_built(plans: Any) -> None:
    found = plan_finetuning(lora("llm", also_train=["llm.norm"]), plans, seed=5)
    assert found is not None
    both = {5: plans[5].build(), 6: plans[6].build(), 7: plans[7].build()}
    alone = {6: plans[6].build()}
    state = torch.get_rng_state()
    apply(found, both)
    apply(found, alone)
    assert torch.equal(torch.get_rng_state(), state)
    weights = {name: p for name, p in alone[6].named_parameters() if p.requires_grad}
    assert len(weights) == 2 * 7
    assert all(".lora_A." in name or not p.any() for name, p in weights.items())
    again = dict(both[6].named_parameters())
    other = dict(both[5].named_parameters())
    for name, parameter in weights.items():
        assert torch.equal(parameter, again[name])
        assert ".lora_B." in name or not torch.equal(parameter, other[name])
    assert [p.requires_grad for p in both[7].parameters()] == [True]


def test_names_are_those_of_the_hugging_face_model(plans: Any) -> None:
    found = plan_finetuning(lora("llm.layers.0"), plans)
    assert found is not None
    layer = plans[5].build()
    plain = {layer.hf_name(name) for name, _ in layer.named_parameters()}
    apply(found, {5: layer})
    names = {layer.hf_name(name) for name, _ in layer.named_parameters()}
    assert {name for name in names if not is_adapter(name)} == plain
    assert "model.language_model.layers.0.mlp.up_proj.lora_A.default.weight" in names


@pytest.mark.parametrize("pattern", ["llm.head", "llm.embed", "*.bias"])
def test_what_has_no_linear_layer_is_refused(pattern: str, plans: Any) -> None:
    with pytest.raises(ConfigError, match="must match a linear layer"):
        plan_finetuning(lora(pattern), plans)


def test_a_missing_package_is_named(plans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs the package peft.*dflop_ds\[lora\]"):
        plan_finetuning(lora("llm"), plans)


def test_merging_is_that_of_peft() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(5, 3))
    weight = base[0].weight.detach().clone()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"]))
    torch.nn.init.normal_(model.base_model.model[0].lora_B["default"].weight)
    layer = model.base_model.model[0]
    known = {"0.weight": weight} | {
        f"0.lora_{letter}.default.weight": getattr(layer, f"lora_{letter}")["default"].weight.detach().clone()
        for letter in "AB"
    }
    found = merged(known.__getitem__, known, scale=3.0)("0.weight")
    torch.testing.assert_close(found, model.merge_and_unload()[0].weight)
    assert merged(known.__getitem__, known, scale=None)("0.weight") is weight
