"""Zero-weight media: the loss does not change, the encoder gets gradients of zero."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.hf_data import (
    PackedCollator,
    PaddedCollator,
    Sample,
    SyntheticSamples,
    build_model,
    tiny_llava,
)
from dflop_ds.errors import DataError
from dflop_ds.integrations.hf_media import (
    Dummy,
    DummyMedia,
    add_dummy,
    mask_labels,
    media_flags,
    needed_flags,
)

IMAGE, VIDEO = 1, 2


def media_of(config, dataset, collator=PaddedCollator, known=(2, 3)):
    planner = SimpleNamespace(
        media_candidates=lambda with_frames, limit: [] if with_frames else [*known][:limit],
        shortest_first=lambda rows: sorted(rows, key=lambda row: len(dataset[row]["input_ids"])),
    )
    return DummyMedia(config, lambda row: collated(dataset, collator, [row]), planner)


@pytest.fixture(scope="module")
def config():
    return tiny_llava()


@pytest.fixture(scope="module")
def dataset(config):
    samples = [Sample(9), Sample(14), Sample(10, ((56, 28),)), Sample(8, ((28, 28),) * 2)]
    return SyntheticSamples(samples, config)


def collated(dataset, collator, rows):
    return collator()([{k: v for k, v in dataset[row].items() if k != "length"} for row in rows])


def gradients(model, batch):
    model.zero_grad()
    loss = model.train()(**batch, num_items_in_batch=10).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("collator", [PaddedCollator, PackedCollator])
def test_loss_and_gradients_stay_and_every_parameter_takes_part(config, dataset, collator):
    model = build_model(config)
    media = media_of(config, dataset, collator)
    text = collated(dataset, collator, [0, 1])
    completed = media.complete(text, IMAGE)
    assert media_flags(text) == 0 and media_flags(completed) == IMAGE
    plain_loss, plain = gradients(model, text)
    plain = {name: None if grad is None else grad.clone() for name, grad in plain.items()}
    loss, found = gradients(model, completed)
    assert loss == pytest.approx(float(plain_loss), rel=1e-6)
    skipped = [name for name, grad in plain.items() if grad is None]
    assert any("vision_tower" in name for name in skipped)
    for name, grad in found.items():
        if name not in skipped:
            torch.testing.assert_close(grad, plain[name], rtol=1e-5, atol=1e-7)
        elif grad is not None:
            assert float(grad.abs().max()) == 0.0
    gradients(model, collated(dataset, collator, [2]))
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, grad in found.items() if grad is not None} == reached


def test_images_of_native_resolution_change_nothing_either():
    text = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **ids)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with_image = {
        "input_ids": torch.tensor([[5, 92, 90, 90, 90, 90, 93, 6]]),
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    planner = SimpleNamespace(media_candidates=lambda **_: [0], shortest_first=list)
    media = DummyMedia(config, lambda row: with_image, planner)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    tokens = torch.randint(8, 80, (2, 6))
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask == 1, -100)}
    plain_loss, plain = gradients(model, batch)
    plain = {name: grad.clone() for name, grad in plain.items() if grad is not None}
    loss, found = gradients(model, media.complete(batch, IMAGE))
    assert loss == pytest.approx(float(plain_loss), rel=1e-6)
    for name, grad in found.items():
        torch.testing.assert_close(grad, plain.get(name, torch.zeros_like(grad)), rtol=1e-5, atol=1e-6)
    assert any(name not in plain for name in found)


def test_a_batch_that_has_the_media_is_left_alone(config, dataset):
    media = DummyMedia(config, lambda row: pytest.fail("no media are needed"), None)
    batch = collated(dataset, PaddedCollator, [0, 2])
    assert media.complete(batch, IMAGE) is batch


def test_media_that_are_nowhere_in_the_data_are_named(config, dataset):
    media = media_of(config, dataset)
    with pytest.raises(DataError, match="pixel_values_videos"):
        media.complete(collated(dataset, PaddedCollator, [0]), VIDEO)


def test_model_without_a_placeholder_token_is_refused(dataset):
    media = media_of(object(), dataset)
    with pytest.raises(DataError, match="image_token_id"):
        media.complete(collated(dataset, PaddedCollator, [0]), IMAGE)


def test_offsets_of_variable_length_attention_get_a_segment(config, dataset):
    media = media_of(config, dataset, PackedCollator)
    batch = collated(dataset, PackedCollator, [0, 1])
    batch |= {"cu_seq_lens_q": torch.tensor([0, 9, 23], dtype=torch.int32), "max_length_q": 14}
    completed = media.complete(batch, IMAGE)
    added = completed["input_ids"].shape[1] - 23
    assert completed["cu_seq_lens_q"].tolist() == [0, 9, 23, 23 + added]
    assert completed["max_length_q"] == max(14, added)
    assert completed["position_ids"][0, 23:].tolist() == list(range(added))


@pytest.mark.parametrize(("key", "shape"), [("attention_mask", (1, 1, 9, 9)), ("position_ids", (3, 1, 9))])
def test_what_cannot_be_extended_is_refused(dataset, key, shape):
    batch = collated(dataset, PackedCollator, [0]) | {key: torch.zeros(shape)}
    with pytest.raises(DataError, match=f"{key} must have shape"):
        add_dummy(batch, Dummy({}, 3, 5))


def test_media_of_unknown_size_are_looked_for_in_the_bins_that_hold_some(config, dataset):
    loaded = []

    def load(row):
        loaded.append(row)
        return collated(dataset, PaddedCollator, [row])

    media = media_of(config, dataset, known=())
    media._load = load
    media.note([0, IMAGE, 0], [(0,), (1, 3), (0,)])
    media.note([0, 0, 0], [(0,), (1,), (2,)])
    batch = collated(dataset, PaddedCollator, [0])
    assert media_flags(media.complete(batch, IMAGE)) == IMAGE
    assert media_flags(media.complete({**batch, "pixel_values": None}, IMAGE)) == IMAGE
    assert loaded == [1, 3]


def test_needed_kinds_per_slot_and_of_the_whole_step_in_the_last():
    assert needed_flags([[IMAGE, 0, 0], [0, VIDEO, 0]]) == [IMAGE, VIDEO, IMAGE | VIDEO]
    assert needed_flags([[0, 0], [0, 0]]) == [0, 0]
    assert needed_flags([[0, 0], [0, 0]], first=IMAGE) == [IMAGE, IMAGE]


def test_masked_labels():
    batch = {"input_ids": torch.ones(1, 3), "labels": torch.tensor([[1, -100, 2]])}
    masked = mask_labels(batch)
    assert masked["labels"].tolist() == [[-100] * 3]
    assert batch["labels"].tolist() == [[1, -100, 2]]
