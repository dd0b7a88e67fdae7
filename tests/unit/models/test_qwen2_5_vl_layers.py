"""Qwen2.5-VL layers beside their values: kinds, published weights, refused configurations, positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration

from benchmarks.parity.compare import Media, Pair
from benchmarks.parity.qwen2_5_vl import VARIANTS, make_config
from dflop_ds.data.layout import PackedLayout
from dflop_ds.errors import ModelError
from dflop_ds.families import family_of, model_dims
from dflop_ds.models.qwen2_5_vl import MropeBlock, PatchOrder, pipeline_layers
from dflop_ds.models.weights import Checkpoint, load_layers

LOGITS_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(VARIANTS[0])


def test_kinds_are_those_that_the_cost_model_expects() -> None:
    config = make_config()
    dims = model_dims(config.to_dict())
    expected = ["vision_embed", *dims.vision.layer_kinds, "projector", "token_embed"]
    expected += ["decoder_block"] * dims.llm.num_layers + ["norm", "head"]
    assert [plan.kind for plan in pipeline_layers(config)] == expected


def test_published_weight_names(pair: Pair, tmp_path: Path) -> None:
    """A checkpoint as published: what transformers makes of it gives the same logits."""
    family = family_of(pair.variant.config.to_dict())
    published = {}
    for name, tensor in pair.reference.state_dict().items():
        current, old = next((n for n in family.published_names if name.startswith(n[0])), ("", ""))
        published[old + name[len(current) :]] = tensor.contiguous()
    assert {name.split(".")[0] for name in published} == {"visual", "model", "lm_head"}
    assert "model.layers.0.mlp.up_proj.weight" in published
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pair.variant.config.save_pretrained(tmp_path)
    reference, found = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    other = Pair(VARIANTS[0], seed=1)
    load_layers(other.layers, Checkpoint(tmp_path, family.published_names))
    other.reference = reference.eval()
    with torch.no_grad():
        samples = [other.sample(Media(((60, 50),), (3,)), 0)]
        difference = other.logits(samples) - other.reference_logits(samples)
    assert difference.abs().max() <= LOGITS_TOLERANCE


def _vector(pair: Pair, *media: Media) -> torch.Tensor:
    samples = [pair.sample(one, seed) for seed, one in enumerate(media)]
    layout = PackedLayout(
        tag=0,
        segment_lengths=tuple(len(sample.input_ids) for sample in samples),
        media=tuple(item for sample in samples for item in sample.items),
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        logit_positions=torch.arange(0),
    )
    return layout.encode()


def test_attention_is_asked_for_windows_and_for_frames(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of 4 x 5 tokens in windows of 3 x 3, and a clip of 3 frames of 2 x 3 tokens."""
    asked: list[tuple[Any, ...]] = []

    def probe(module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **options: Any):
        asked.append((query.shape[2], attention_mask, options["is_causal"], options["segment_lengths"]))
        return query.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "qwen_probe", probe)
    carry = (torch.randn(4 * (20 + 2 * 6), 96), _vector(pair, Media(((32, 40),), (3,))))
    for plan in pipeline_layers(pair.variant.config, attention="qwen_probe")[:3]:
        carry = plan.build()(carry)
    windows = (36, 24, 12, 8, 24, 24)
    frames = (80, 24, 24)
    assert asked == [(128, None, False, windows), (128, None, False, frames)]


def test_order_and_positions_are_computed_once_per_microbatch(pair: Pair) -> None:
    vector = _vector(pair, Media(((32, 40),)), Media())
    assert PatchOrder.of(vector, pair.rule) is PatchOrder.of(vector, pair.rule)
    order = PatchOrder.of(vector, pair.rule)
    assert torch.equal(order.windowed[order.row_major], torch.arange(20))
    assert sum(order.window_lengths) == sum(order.frame_lengths) == len(order.positions) == 80


def test_positions_restart_with_every_sample(pair: Pair) -> None:
    block = next(layer for layer in pair.layers if isinstance(layer, MropeBlock))
    vector = _vector(pair, Media(), Media(((32, 40),)), Media())
    layout = PackedLayout.decode(vector)
    positions = block.position_ids(layout)
    assert positions.shape == (3, 1, layout.num_tokens)
    first, second, third = positions[:, 0].split(list(layout.segment_lengths), dim=1)
    for text in (first, third):
        assert torch.equal(text, torch.arange(text.shape[1]).expand(3, -1))
    # Four tokens of text, then 4 rows of 5 tokens; text goes on behind the longer side.
    assert second[:, 4:9].tolist() == [[4] * 5, [4] * 5, [4, 5, 6, 7, 8]]
    assert second[:, -2:].tolist() == [[9, 10]] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": {"layer_types": ["full_attention", "sliding_attention"]}}, "sliding window"),
        ({"vision": {"out_hidden_size": 48}}, "out_hidden_size"),
        ({"text": {"rope_parameters": {"mrope_section": [2, 2, 2]}}}, "mrope_section"),
        ({"text": {"rope_parameters": {}}}, "mrope_section"),
    ],
)
def test_configurations_that_the_layers_cannot_represent(change: dict[str, Any], message: str) -> None:
    config = make_config()
    for name, value in change.get("text", {}).items():
        setattr(config.text_config, name, value)
    for name, value in change.get("vision", {}).items():
        setattr(config.vision_config, name, value)
    with pytest.raises(ModelError, match=message):
        pipeline_layers(config)
