"""The media rule against the processor and the model of transformers."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionModel,
    LlavaOnevisionProcessor,
    Qwen2Config,
    SiglipVisionConfig,
)

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import media_rule
from dflop_ds.families.llava_onevision import LlavaOnevisionRule

ODD_SHAPES = [
    (1, 1),
    (1, 499),
    (499, 1),
    (1093, 5),
    (5, 1093),
    (16, 16),
    (1, 100_000),
    (100_000, 1),
    (2, 4999),
]
ODD_SHAPES += [(384, 384), (385, 384), (768, 769), (2304, 2304), (5000, 4000), (337, 1), (70, 70), (71, 69)]


def _shapes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(7)
    usual = np.exp(rng.uniform(np.log(8), np.log(4000), size=(250, 2))).astype(int)
    strips = np.stack([rng.integers(1, 12, 40), rng.integers(200, 5000, 40)], axis=1)
    rows = [*usual.tolist(), *strips.tolist(), *strips[:, ::-1].tolist()]
    return ODD_SHAPES + [(int(height), int(width)) for height, width in rows]


def _config(tile_px: int, grid_side: int, aspect_ratio: str = "anyres_max_9") -> LlavaOnevisionConfig:
    sides = [tile_px * k for k in range(1, grid_side + 1)]
    return LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            image_size=tile_px,
            patch_size=14,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            vision_use_head=False,
        ).to_dict(),
        text_config=Qwen2Config(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        ).to_dict(),
        image_grid_pinpoints=[[height, width] for height in sides for width in sides],
        vision_aspect_ratio=aspect_ratio,
        image_token_index=3,
        video_token_index=4,
    )


CONFIGS = {
    "original": _config(384, 6),
    "odd side": _config(70, 6),
    "even side": _config(56, 3),
    "other limit": _config(56, 4, "anyres_max_4"),
}


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> LlavaOnevisionConfig:
    return CONFIGS[request.param]


def _rule(config: LlavaOnevisionConfig) -> LlavaOnevisionRule:
    rule = media_rule(config.to_dict())
    assert isinstance(rule, LlavaOnevisionRule)
    return rule


def _processor(config: LlavaOnevisionConfig) -> Any:
    """The token counting of the processor, which cannot be built whole without torchvision."""
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.num_image_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    processor.vision_feature_select_strategy = "full"
    processor.vision_aspect_ratio = config.vision_aspect_ratio
    processor.image_token, processor.video_token = "<image>", "<video>"
    processor.image_processor = types.SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints)
    return processor


def test_tokens_equal_the_processor_and_the_model(config: LlavaOnevisionConfig) -> None:
    """Processor and model agree on every one of these sizes, however odd, and so does the rule."""
    rule, processor, tile_px = _rule(config), _processor(config), config.vision_config.image_size
    model = LlavaOnevisionModel(config)
    shapes = _shapes()
    assert len(shapes) >= 300
    for height, width in shapes:
        predicted = rule.image(height, width, 1)
        counted = processor._get_number_of_features(height, width, tile_px, tile_px)
        features = torch.zeros(predicted.num_inputs, rule.patches_per_side**2, 1)
        packed, _ = model.pack_image_features(
            [features],
            torch.tensor([[height, width]]),
            image_newline=torch.zeros(1),
            vision_aspect_ratio=config.vision_aspect_ratio,
        )
        assert (predicted.num_tokens, len(packed[0])) == (counted, counted), (height, width)


def test_tiles_equal_the_image_processor() -> None:
    """Tiles are counted by cutting real pixels."""
    config = CONFIGS["odd side"]
    rule = _rule(config)
    size = {"height": 70, "width": 70}
    processor = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=config.image_grid_pinpoints)
    small = [(height, width) for height, width in _shapes() if height * width <= 60_000]
    assert len(small) >= 100
    for height, width in small:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        tiles = processor(image, input_data_format="channels_last", return_tensors="pt")["pixel_values"][0]
        assert rule.image(height, width, 1).num_inputs == len(tiles), (height, width)


def test_images_in_company_are_one_tile_each(config: LlavaOnevisionConfig) -> None:
    rule, processor = _rule(config), _processor(config)
    shape = rule.image(900, 30, num_images=2)
    text = processor.replace_image_token({"batch_num_images": [2]}, 0)
    assert (shape.num_inputs, shape.num_tokens) == (1, text.count("<image>"))
    model = LlavaOnevisionModel(config)
    features = [torch.zeros(1, rule.patches_per_side**2, 1)]
    _, lengths = model.pack_image_features(features, torch.tensor([[900, 30]]), image_newline=torch.zeros(1))
    assert int(lengths[0]) == shape.num_tokens


@pytest.mark.parametrize("num_frames", [1, 2, 31])
def test_clip_tokens_equal_the_processor_and_the_model(config: LlavaOnevisionConfig, num_frames: int) -> None:
    rule, processor = _rule(config), _processor(config)
    shape = rule.clip(num_frames)
    text = processor.replace_video_token({"pixel_values_videos": [torch.zeros(num_frames, 1)]}, 0)
    pooled = LlavaOnevisionModel(config).apply_pooling(torch.zeros(num_frames, rule.patches_per_side**2, 8))
    assert shape.num_inputs == num_frames
    assert shape.num_tokens == text.count("<video>") == pooled.shape[0] * pooled.shape[1] + 1


def test_defaults_are_those_of_the_configuration_class() -> None:
    """An empty ``config.json`` means the published architecture."""
    assert LlavaOnevisionRule.from_config({}) == _rule(LlavaOnevisionConfig())


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 5)])
def test_impossible_image_sizes_are_refused(height: int, width: int) -> None:
    with pytest.raises(DataError, match="at least 1 x 1 pixel"):
        _rule(CONFIGS["original"]).image(height, width, 1)


def test_impossible_counts_are_refused() -> None:
    rule = _rule(CONFIGS["original"])
    with pytest.raises(DataError, match="at least 1 frame"):
        rule.clip(0)
    with pytest.raises(DataError, match="num_images must be at least 1"):
        rule.image(5, 5, 0)


def test_an_image_that_the_model_would_shrink_to_nothing_is_refused() -> None:
    """Interpolation to zero rows fails in the model, although its processor counts tokens for it."""
    rule = LlavaOnevisionRule(14, 14, ((14, 14 * 400),), 1, 3, 4)
    with pytest.raises(DataError, match="keep a patch in both directions"):
        rule.image(10, 4000, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_pinpoints": [[384, 500]]}, "multiples of image_size"),
        ({"image_grid_pinpoints": []}, "at least one size"),
        ({"image_grid_pinpoints": [384]}, "list of"),
        ({"vision_aspect_ratio": "pad"}, "anyres_max_"),
        ({"vision_feature_select_strategy": "default"}, "'full'"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "siglip_vision_model"),
        ({"vision_config": {"image_size": 8, "patch_size": 14}}, "patch_size <= image_size"),
    ],
)
def test_configurations_that_the_rule_does_not_describe_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LlavaOnevisionRule.from_config(change)


def test_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'llava_onevision'.*, found 'bert'"):
        media_rule({"model_type": "bert"})
