"""The media rule of InternVL against the processor and the model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GotOcr2ImageProcessorPil, InternVLModel, InternVLProcessor

from benchmarks.parity.internvl import make_config
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import Modality, media_rule, model_dims
from dflop_ds.families.internvl import InternVLRule

ODD_SHAPES = [(1, 1), (1, 499), (499, 1), (1093, 5), (5, 1093), (16, 16), (1, 100_000), (100_000, 1)]
ODD_SHAPES += [(448, 448), (896, 448), (449, 448), (633, 633), (634, 634), (3, 3), (3, 50), (1344, 448)]

PROCESSORS = {
    "original": {"size": {"height": 448, "width": 448}},
    "small tiles": {"size": {"height": 28, "width": 28}, "max_patches": 6},
    "at least 4": {"size": {"height": 28, "width": 28}, "min_patches": 4, "max_patches": 9},
    "one tile": {"size": {"height": 28, "width": 28}, "max_patches": 1},
}


def _shapes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(7)
    usual = np.exp(rng.uniform(np.log(8), np.log(4000), size=(250, 2))).astype(int)
    ties = rng.integers(1, 40, size=(60, 1)) * np.array([[28, 56]])
    strips = np.stack([rng.integers(1, 12, 40), rng.integers(200, 5000, 40)], axis=1)
    rows = [*usual.tolist(), *ties.tolist(), *strips.tolist(), *strips[:, ::-1].tolist()]
    return ODD_SHAPES + [(int(height), int(width)) for height, width in rows]


def _rule(name: str) -> InternVLRule:
    side = PROCESSORS[name]["size"]["height"]
    config = make_config(image_size=[side, side], patch_size=[14, 14]).to_dict()
    rule = media_rule(config, {"preprocessor_config": PROCESSORS[name]})
    assert isinstance(rule, InternVLRule)
    return rule


def _processor(name: str, rule: InternVLRule) -> Any:
    """The token counting of the processor, which cannot be built whole without torchvision."""
    processor = object.__new__(InternVLProcessor)
    processor.image_processor = GotOcr2ImageProcessorPil(**PROCESSORS[name])
    processor.image_seq_length = rule.tokens_per_tile
    processor.start_image_token, processor.end_image_token = "<img>", "</img>"
    processor.image_token = "<IMG_CONTEXT>"
    return processor


@pytest.mark.parametrize("name", PROCESSORS)
def test_tiles_and_tokens_equal_the_processor(name: str) -> None:
    rule = _rule(name)
    processor, shapes = _processor(name, rule), _shapes()
    assert len(shapes) >= 300
    for height, width in shapes:
        item = rule.image(height, width, 1)
        options = {**PROCESSORS[name], "crop_to_patches": True}
        num_tiles = processor.image_processor.get_number_of_image_patches(height, width, options)
        expanded = processor.replace_image_token({"num_patches": [num_tiles]}, 0)
        assert (item.num_inputs, item.num_rows) == (num_tiles, num_tiles), (height, width)
        assert item.num_tokens == expanded.count("<IMG_CONTEXT>")
        (run,) = rule.runs(item)
        text = rule.text(Modality.IMAGE, item)
        assert text.replace("<IMG_CONTEXT>", "<IMG_CONTEXT>" * run) == expanded


@pytest.mark.parametrize("name", ["small tiles", "at least 4", "one tile"])
def test_tiles_are_counted_by_cutting_real_pixels(name: str) -> None:
    rule = _rule(name)
    processor = _processor(name, rule).image_processor
    small = [(height, width) for height, width in _shapes() if height * width <= 60_000]
    assert len(small) >= 100
    for height, width in small:
        image = Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8))
        tiles = processor(image, crop_to_patches=True, return_tensors="np")["pixel_values"]
        assert tiles.shape == (rule.image(height, width, 1).num_rows, 3, 28, 28), (height, width)


@pytest.mark.parametrize("num_frames", [1, 2, 31])
def test_clip_text_equals_the_processor(num_frames: int) -> None:
    rule = _rule("small tiles")
    item = rule.clip(num_frames)
    frames = {"pixel_values_videos": [torch.zeros(num_frames, 3, 28, 28)]}
    expected = _processor("small tiles", rule).replace_video_token(frames, 0)
    parts = rule.text(Modality.VIDEO, item).split("<IMG_CONTEXT>")
    runs = rule.runs(item)
    assert len(runs) == len(parts) - 1 == item.num_rows == num_frames
    expanded = "".join(part + "<IMG_CONTEXT>" * run for part, run in zip(parts, [*runs, 0], strict=True))
    assert expanded == expected
    assert item.num_tokens == expected.count("<IMG_CONTEXT>")


@pytest.mark.parametrize("ratio", [0.5, 0.25, 1.0])
def test_tokens_of_a_tile_equal_the_model(ratio: float) -> None:
    config = make_config(image_size=[32, 32], patch_size=[4, 4])
    config.downsample_ratio = ratio
    features = InternVLModel(config).get_image_features(torch.zeros(2, 3, 32, 32)).pooler_output
    assert InternVLRule.from_config(config.to_dict()).tokens_per_tile == features.shape[1]


def test_settings_inside_the_processor_are_read() -> None:
    config = make_config().to_dict()
    rule = media_rule(config, {"processor_config": {"image_processor": {"max_patches": 3}}})
    assert isinstance(rule, InternVLRule)
    assert rule.max_tiles == 3


def test_settings_are_read_in_the_order_of_transformers(tmp_path: Path) -> None:
    """Of two files the one that the image processor is loaded from counts."""
    settings = {
        "preprocessor_config": {"max_patches": 2},
        "processor_config": {"image_processor": {"max_patches": 4}},
    }
    for name, content in settings.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    loaded = GotOcr2ImageProcessorPil.from_pretrained(tmp_path, local_files_only=True)
    assert InternVLRule.from_config({}, settings).max_tiles == loaded.max_patches == 4


def test_defaults_are_those_of_the_published_models() -> None:
    assert InternVLRule.from_config({}) == InternVLRule(448, 14, 2, 1, 12, 151667)
    assert InternVLRule.from_config({}).tokens_per_tile == 256


def test_dimensions_for_the_cost_model() -> None:
    dims = model_dims(make_config().to_dict())
    assert (dims.vision.hidden, dims.vision.num_layers, dims.llm.hidden) == (16, 3, 32)


def test_impossible_media_are_refused() -> None:
    rule = _rule("original")
    with pytest.raises(DataError, match="at least 1 x 1 pixel"):
        rule.image(0, 5, 1)
    with pytest.raises(DataError, match="at least 1 frame"):
        rule.clip(0)
    with pytest.raises(DataError, match="takes no audio files"):
        rule.audio(100)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, {}, "'default'"),
        ({"downsample_ratio": 0.3}, {}, "one over a whole number"),
        ({"downsample_ratio": 0.0}, {}, "one over a whole number"),
        ({"vision_config": {"image_size": 42, "patch_size": 14}}, {}, "must divide the 3 patches"),
        ({"vision_config": {"image_size": [448, 224]}}, {}, "must be a square"),
        ({"vision_config": {"image_size": 8, "patch_size": 14}}, {}, "patch_size <= image_size"),
        ({}, {"min_patches": 5, "max_patches": 4}, "min_patches <= max_patches"),
    ],
)
def test_configurations_that_the_rule_does_not_describe_are_refused(
    change: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        InternVLRule.from_config(change, {"preprocessor_config": settings})
