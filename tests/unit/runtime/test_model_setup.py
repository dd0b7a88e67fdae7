"""The model of a directory: which weights count, and whether its embeddings are tied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from benchmarks.parity import internvl, llava_onevision
from dflop_ds.config import DflopConfig
from dflop_ds.errors import ModelError
from dflop_ds.families import family_of
from dflop_ds.models.export import HuggingFaceWriter
from dflop_ds.models.weights import EMBEDDING, HEAD, Checkpoint, load_layers, named_weights
from dflop_ds.runtime.model_setup import is_pretrained, model_content, read_model_config


def _config(path: Path, weights: str = "auto") -> DflopConfig:
    return DflopConfig.model_validate({"model": {"path": str(path), "weights": weights}})


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_weights_in_another_format_are_not_taken_for_none(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"weights")
    with pytest.raises(ModelError, match=f"found {file}.*save_pretrained"):
        is_pretrained(_config(tmp_path))
    assert not is_pretrained(_config(tmp_path, "random"))


def test_the_directory_decides_about_weights(tmp_path: Path) -> None:
    assert not is_pretrained(_config(tmp_path))
    assert is_pretrained(_config(tmp_path, "pretrained"))
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    assert is_pretrained(_config(tmp_path))
    assert not is_pretrained(_config(tmp_path, "random"))


def _llava_says_tied(content: dict[str, Any]) -> None:
    content.pop("tie_word_embeddings", None)
    content["text_config"]["tie_word_embeddings"] = True


def _internvl_says_nothing(content: dict[str, Any]) -> None:
    """As saved by releases of ``transformers`` that did not know the key; it is true by default."""
    del content["tie_word_embeddings"]


CONTRADICTIONS = {
    "internvl": (internvl.make_config, _internvl_says_nothing),
    "llava_onevision": (llava_onevision.make_config, _llava_says_tied),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_weights_that_differ_are_not_tied(name: str, tmp_path: Path, caplog: Any) -> None:
    """Whatever the configuration says; so does ``transformers``."""
    make_config, change = CONTRADICTIONS[name]
    source, out = tmp_path / "source", tmp_path / "out"
    AutoModelForMultimodalLM.from_config(make_config(tied=False)).save_pretrained(source)
    content = json.loads((source / "config.json").read_text())
    change(content)
    (source / "config.json").write_text(json.dumps(content))
    assert AutoConfig.from_pretrained(source).tie_word_embeddings
    reference = AutoModelForMultimodalLM.from_pretrained(source).state_dict()
    assert not torch.equal(reference[HEAD], reference[EMBEDDING])

    config = read_model_config(_config(source))
    assert "they are not tied" in caplog.text
    assert read_model_config(_config(source, "random")).tie_word_embeddings
    family = family_of(model_content(config))
    layers = [plan.build() for plan in family.pipeline_layers(config)]
    load_layers(layers, Checkpoint(source, family.published_names))
    trained = {n: p.detach() + 1 for layer in layers for n, p in named_weights(layer).items()}
    assert trained.keys() >= {HEAD, EMBEDDING}
    for weight, value in trained.items():
        assert torch.equal(value, reference[weight] + 1), weight

    out.mkdir()
    shapes = [{weight: tuple(value.shape) for weight, value in trained.items()}]
    options = {"published_names": family.published_names}
    writer = HuggingFaceWriter(
        out, source, AutoConfig.from_pretrained(source), shapes, torch.float32, **options
    )
    writer.write_stage(0, trained.__getitem__)
    writer.write_rest()
    assert not AutoConfig.from_pretrained(out).tie_word_embeddings
    exported, info = AutoModelForMultimodalLM.from_pretrained(out, output_loading_info=True)
    assert [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
    assert torch.equal(exported.state_dict()[HEAD], trained[HEAD])
    assert torch.equal(exported.state_dict()[EMBEDDING], trained[EMBEDDING])


def test_tied_weights_that_are_stored_twice_stay_tied(tmp_path: Path) -> None:
    model = AutoModelForMultimodalLM.from_config(internvl.make_config(tied=False))
    model.lm_head.weight.data.copy_(model.get_input_embeddings().weight.data)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True}))
    assert read_model_config(_config(tmp_path)).tie_word_embeddings
