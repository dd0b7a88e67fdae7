"""Qwen2-Audio: weights by published names, the table that is never trained, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2AudioForConditionalGeneration

from benchmarks.parity.qwen2_audio import AUDIO_ID, MEL_BINS, VOCAB, make_config
from dflop_ds.config.finetune import FinetuneConfig
from dflop_ds.data.layout import PackedLayout
from dflop_ds.errors import ModelError
from dflop_ds.families.qwen2_audio import FAMILY, Qwen2AudioRule
from dflop_ds.models.qwen2_audio import pipeline_layers
from dflop_ds.models.weights import Checkpoint, load_layers
from dflop_ds.runtime.finetune import plan_finetuning

TABLE = "model.audio_tower.embed_positions.weight"
PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}


@pytest.mark.parametrize("published", [False, True])
def test_checkpoints_are_read(published: bool, tmp_path: Path) -> None:
    state = Qwen2AudioForConditionalGeneration(make_config()).state_dict()

    def saved_name(name: str) -> str:
        prefix = next((prefix for prefix in PUBLISHED if published and name.startswith(prefix)), "")
        return PUBLISHED.get(prefix, "") + name[len(prefix) :]

    saved = {saved_name(name): torch.randn(value.shape) for name, value in state.items()}
    save_file(saved, str(tmp_path / "model.safetensors"))
    layers = [plan.build() for plan in pipeline_layers(make_config())]
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    found = {layer.hf_name(name): p for layer in layers for name, p in layer.named_parameters()}
    assert found.keys() == state.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, saved[saved_name(name)])


def test_what_save_pretrained_writes_is_read(tmp_path: Path) -> None:
    model = Qwen2AudioForConditionalGeneration(make_config())
    model.save_pretrained(tmp_path)
    layers = [plan.build() for plan in pipeline_layers(make_config())]
    load_layers(layers, Checkpoint(tmp_path, FAMILY.published_names))
    state = model.state_dict()
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, state[layer.hf_name(name)])


@pytest.mark.parametrize("freeze", [[], ["llm"]])
def test_the_position_table_is_never_trained(freeze: list[str]) -> None:
    plans = pipeline_layers(make_config())
    assert [name for name, p in plans[0].build().named_parameters() if not p.requires_grad] == [
        "embed_positions.weight"
    ]
    config = FinetuneConfig(freeze=freeze, param_groups=[{"match": ["projector"], "lr": 0.1}])
    finetuning = plan_finetuning(config, plans)
    assert finetuning is not None
    assert TABLE in finetuning.frozen
    assert "model.audio_tower.conv1.weight" not in finetuning.frozen
    # Two blocks of 12 parameters, embedding, norm and head.
    assert len(finetuning.frozen) == 1 + 27 * len(freeze)


def test_a_microbatch_without_recordings_keeps_the_path_of_the_gradient() -> None:
    ids = torch.arange(5)
    layout = PackedLayout(0, (5,), (), ids, ids)
    layers = [plan.build() for plan in pipeline_layers(make_config())]
    carry = (torch.empty(0, 8, requires_grad=True), layout.encode())
    for layer in layers[:4]:
        carry = layer(carry)
    assert carry[0].shape == (0, 32)
    carry[0].sum().backward()
    for layer in (layers[0], layers[3]):
        trained = [p for p in layer.parameters() if p.requires_grad]
        assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_a_bf16_model_takes_fp32_frames() -> None:
    """The media tensor is fp32 whatever the weights are."""
    item = Qwen2AudioRule.from_config(make_config().to_dict()).audio(9_000)
    ids = torch.cat([torch.arange(3), torch.full((item.num_tokens,), AUDIO_ID)])
    layout = PackedLayout(0, (len(ids),), (item,), ids, torch.arange(3))
    carry = (torch.randn(item.num_rows, MEL_BINS), layout.encode())
    for plan in pipeline_layers(make_config()):
        carry = plan.build().bfloat16()(carry)
    assert carry.dtype == torch.bfloat16
    assert carry.shape == (3, VOCAB)


def test_refused_configurations_name_the_value() -> None:
    config = make_config()
    config.audio_config.encoder_layerdrop = 0.1
    with pytest.raises(ModelError, match=r"encoder_layerdrop must be 0, found 0\.1"):
        pipeline_layers(config)
    config = make_config()
    config.audio_config.model_type = "whisper"
    with pytest.raises(ModelError, match='"qwen2_audio_encoder", found "whisper"'):
        pipeline_layers(config)


def test_the_given_configuration_is_left_unchanged() -> None:
    config = make_config()
    before = config.to_dict(), config.audio_config._attn_implementation
    pipeline_layers(config, attention="dflop_varlen")
    assert (config.to_dict(), config.audio_config._attn_implementation) == before
