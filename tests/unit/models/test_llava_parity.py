"""Logits of the pipeline layers equal those of the ``transformers`` model with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.data.layout import PackedLayout
from dflop_ds.families.llava_onevision import LlavaOnevisionRule
from dflop_ds.models.attention import SEGMENTS_NAME
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.models.weights import load_layers

IMAGE_ID, VIDEO_ID, VOCAB = 98, 99, 100
TOLERANCE = 1e-4


def make_config(
    language: str = "qwen2", *, tied: bool = False, feature_layer: int = -1
) -> LlavaOnevisionConfig:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    vision = SiglipVisionConfig(
        image_size=20,
        patch_size=4,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        vision_use_head=False,
    )
    pinpoints = [[20 * i, 20 * j] for i in range(1, 5) for j in range(1, 5)]
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=Qwen2Config(**text) if language == "qwen2" else LlamaConfig(**text),
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
        vision_feature_layer=feature_layer,
        tie_word_embeddings=tied,
    )


class Sample:
    """Random tokens around random media."""

    def __init__(
        self, rule: LlavaOnevisionRule, seed: int, images: list[tuple[int, int]] = (), frames: int = 0
    ):
        generator = torch.Generator().manual_seed(seed)
        self.images, self.frames = list(images), frames
        items, ids = [], [torch.randint(0, 90, (3 + seed % 5,), generator=generator)]
        for height, width in self.images:
            shape = rule.image(height, width, len(self.images))
            items.append(shape)
            ids += [
                torch.full((shape.num_tokens,), IMAGE_ID),
                torch.randint(0, 90, (2,), generator=generator),
            ]
        if frames:
            shape = rule.clip(frames)
            items.append(shape)
            ids += [
                torch.full((shape.num_tokens,), VIDEO_ID),
                torch.randint(0, 90, (4,), generator=generator),
            ]
        self.media, self.input_ids = tuple(items), torch.cat(ids)
        count = sum(item.num_inputs for item in items)
        self.pixels = torch.randn(count, 3, rule.tile_px, rule.tile_px, generator=generator)

    def hugging_face_logits(self, model: LlavaOnevisionForConditionalGeneration) -> torch.Tensor:
        inputs = {"input_ids": self.input_ids[None]}
        tiles = self.pixels.split([item.num_inputs for item in self.media]) if self.media else []
        if self.images:
            tiles, rest = tiles[: len(self.images)], tiles[len(self.images) :]
            most = max(t.shape[0] for t in tiles)
            padded = [torch.cat([t, torch.zeros(most - t.shape[0], *t.shape[1:])]) for t in tiles]
            inputs["pixel_values"] = torch.stack(padded)
            inputs["image_sizes"] = torch.tensor(self.images)
            inputs["batch_num_images"] = torch.tensor([len(self.images)])
            tiles = rest
        if self.frames:
            inputs["pixel_values_videos"] = tiles[-1][None]
        return model(**inputs).logits[0]


def pipeline_logits(layers: list[torch.nn.Module], samples: list[Sample]) -> torch.Tensor:
    ids = torch.cat([sample.input_ids for sample in samples])
    layout = PackedLayout(
        tag=0,
        segment_lengths=tuple(len(sample.input_ids) for sample in samples),
        media=tuple(item for sample in samples for item in sample.media),
        input_ids=ids,
        logit_positions=torch.arange(len(ids)),
    )
    carry = (torch.cat([sample.pixels for sample in samples]), layout.encode())
    for layer in layers:
        carry = layer(carry)
    return carry


def build(config: LlavaOnevisionConfig):
    torch.manual_seed(0)
    reference = LlavaOnevisionForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.2)
    shared: dict[str, torch.nn.Module] = {}
    layers = []
    for plan in pipeline_layers(config, attention=SEGMENTS_NAME):
        module = shared.setdefault(plan.tied_key, plan.build()) if plan.tied_key else plan.build()
        load_layers([module], reference.state_dict())
        layers.append(module if plan.forward_fn is None else (lambda c, m=module, p=plan: p.forward_fn(m, c)))
    return reference, layers


CASES = {
    "text": [{}],
    "one_image": [{"images": [(37, 61)]}],
    "wide_image": [{"images": [(7, 199)]}],
    "tall_image": [{"images": [(300, 11)]}],
    "tiny_image": [{"images": [(1, 1)]}],
    "shrunk_image": [{"images": [(160, 159)]}],
    "several_images": [{"images": [(20, 20), (64, 9), (5, 80)]}],
    "clip": [{"frames": 5}],
    "image_and_clip": [{"images": [(33, 44)], "frames": 2}],
    "packed_mixture": [{"images": [(37, 61)]}, {}, {"frames": 3}, {"images": [(9, 9), (30, 90)]}, {}],
    "packed_text": [{}, {}, {}],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("language", ["qwen2", "llama"])
def test_logits_equal_transformers(case: str, language: str) -> None:
    config = make_config(language)
    reference, layers = build(config)
    rule = LlavaOnevisionRule.from_config(config.to_dict())
    samples = [Sample(rule, seed, **kwargs) for seed, kwargs in enumerate(CASES[case])]
    with torch.no_grad():
        expected = torch.cat([sample.hugging_face_logits(reference) for sample in samples])
        found = pipeline_logits(layers, samples)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("feature_layer", [-2, 2])
def test_feature_layer_drops_blocks(feature_layer: int) -> None:
    config = make_config(feature_layer=feature_layer)
    reference, layers = build(config)
    samples = [Sample(LlavaOnevisionRule.from_config(config.to_dict()), 0, images=[(37, 61)])]
    with torch.no_grad():
        expected = samples[0].hugging_face_logits(reference)
        assert (pipeline_logits(layers, samples) - expected).abs().max() <= TOLERANCE
    assert len(layers) == len(pipeline_layers(make_config())) - 1


def test_tied_head_uses_the_embedding() -> None:
    config = make_config(tied=True)
    reference, layers = build(config)
    samples = [Sample(LlavaOnevisionRule.from_config(config.to_dict()), 3, images=[(37, 61)])]
    with torch.no_grad():
        expected = samples[0].hugging_face_logits(reference)
        assert (pipeline_logits(layers, samples) - expected).abs().max() <= TOLERANCE


def test_logits_only_where_wanted() -> None:
    config = make_config()
    _, layers = build(config)
    sample = Sample(LlavaOnevisionRule.from_config(config.to_dict()), 1, images=[(37, 61)])
    with torch.no_grad():
        full = pipeline_logits(layers, [sample])
        wanted = torch.tensor([0, 4, len(sample.input_ids) - 1])
        layout = PackedLayout(0, (len(sample.input_ids),), sample.media, sample.input_ids, wanted)
        carry = (sample.pixels, layout.encode())
        for layer in layers:
            carry = layer(carry)
    assert torch.allclose(carry, full[wanted], atol=1e-6)
