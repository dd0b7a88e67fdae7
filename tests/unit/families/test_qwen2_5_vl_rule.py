"""The media rule of Qwen2.5-VL against the processors of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLImageProcessorPil
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_window_index

from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import Modality, media_rule
from dflop_ds.families.patches import PatchGrid, PixelBudget
from dflop_ds.families.qwen2_5_vl import Qwen25VlRule, processor_settings
from tests.support.video_processor import qwen2_vl_video_source

PUBLISHED = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
"""Image settings of the published checkpoints."""

ODD_SHAPES = [(1, 1), (16, 16), (1, 499), (1093, 5), (1, 200), (200, 1), (1, 201), (5, 1000)]
ODD_SHAPES += [(56, 56), (28, 5600), (42, 42), (70, 98), (13, 2600), (20_000, 100), (9000, 9000)]


def _shapes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(11)
    usual = np.exp(rng.uniform(0, np.log(7000), size=(330, 2))).astype(int).tolist()
    strips = [(int(side), int(side * ratio)) for side, ratio in rng.uniform((1, 150), (20, 250), (60, 2))]
    return ODD_SHAPES + [(h, w) for h, w in usual] + strips + [(w, h) for h, w in strips]


NARROW = {"size": {"shortest_edge": 10_000, "longest_edge": 20_000}}


@pytest.mark.parametrize("settings", [{}, PUBLISHED, NARROW])
def test_patches_equal_the_image_processor(settings: dict[str, Any]) -> None:
    """Also refused are exactly the sizes that the processor refuses."""
    processor = Qwen2VLImageProcessorPil(**settings)
    rule = Qwen25VlRule.from_config({}, {"preprocessor_config": processor.to_dict()})
    num_refused = 0
    shapes = _shapes()
    assert len(shapes) >= 300
    for height, width in shapes:
        try:
            counted = processor.get_number_of_image_patches(height, width)
        except ValueError:
            num_refused += 1
            with pytest.raises(DataError, match="aspect ratio of at most 200"):
                rule.image(height, width, 1)
            continue
        item = rule.image(height, width, 1)
        assert (item.num_inputs, item.num_rows) == (counted, counted), (height, width)
        assert item.num_tokens == counted // 4
    assert num_refused >= 20


def test_grids_equal_those_of_real_pixels() -> None:
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40})
    rule = Qwen25VlRule.from_config({}, {"preprocessor_config": processor.to_dict()})
    small = [s for s in _shapes() if s[0] * s[1] <= 60_000 and max(s) / min(s) <= 200]
    assert len(small) >= 100
    for height, width in small:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        found = processor(image, input_data_format="channels_last")
        grid = rule.image_grid(height, width)
        assert found["image_grid_thw"].tolist() == [[grid.frames, grid.rows, grid.columns]], (height, width)
        assert found["pixel_values"].shape == (grid.num_patches, rule.values_per_patch)


@pytest.fixture(scope="module")
def video_source() -> Any:
    return qwen2_vl_video_source()


@pytest.mark.parametrize("num_frames", [1, 2, 31])
def test_patches_of_clips_equal_the_video_processor(video_source: Any, num_frames: int) -> None:
    processor = object.__new__(video_source.Qwen2VLVideoProcessor)
    rule = Qwen25VlRule.from_config({})
    for height, width in _shapes():
        try:
            counted = processor.get_num_of_video_patches(num_frames, height, width, {})
        except ValueError:
            with pytest.raises(DataError, match="aspect ratio of at most 200"):
                rule.clip(num_frames, height, width, 0.5)
            continue
        item = rule.clip(num_frames, height, width, 0.5)
        assert item.num_rows == counted, (height, width)
        assert item.num_tokens == counted // 4


@pytest.mark.parametrize("num_frames", [1, 2, 3, 31])
def test_the_last_frame_of_an_odd_number_is_repeated(video_source: Any, num_frames: int) -> None:
    processor = object.__new__(video_source.Qwen2VLVideoProcessor)
    patches, *grid = processor.patchify(torch.zeros(1, num_frames, 3, 56, 84), 14, 2, 2)
    budget = PixelBudget(1, 10**9)
    rule = Qwen25VlRule(14, 2, 2, 112, 4, budget, budget, None, 1, 2)
    found = rule.clip_grid(num_frames, 56, 84)
    assert [found.frames, found.rows, found.columns] == grid
    assert found.num_patches == patches.shape[1]


def test_clips_are_not_capped_unless_asked_for(video_source: Any) -> None:
    """The default of the processor; it has announced another one."""
    assert not video_source.Qwen2VLVideoProcessor.cap_pixels_per_frame
    assert Qwen25VlRule.from_config({}).max_clip_tokens is None


@pytest.mark.parametrize("num_frames", [2, 64, 311, 768])
def test_frames_of_a_capped_clip_share_its_budget(
    video_source: Any, monkeypatch: pytest.MonkeyPatch, num_frames: int
) -> None:
    """``cap_pixels_per_frame``: the processor's resize is asked for the size it wants."""
    processor_class = video_source.Qwen2VLVideoProcessor

    def asked(self: Any, image: Any, size: SizeDict, resample: Any) -> tuple[int | None, int | None]:
        return size.height, size.width

    monkeypatch.setattr(video_source.BaseVideoProcessor, "resize", asked)
    processor = object.__new__(processor_class)
    settings = {"cap_pixels_per_frame": True, "max_video_tokens": 32_000}
    processor.max_video_tokens = 32_000
    rule = Qwen25VlRule.from_config({}, {"video_preprocessor_config": settings})
    for height, width in [(1080, 1920), (480, 640), (30, 900), (2000, 2000)]:
        frames = torch.empty(1, num_frames, 3, height, width, device="meta")
        options = {"factor": 28, "temporal_factor": 2, "cap_pixels_per_frame": True}
        wanted = processor.resize(frames, SizeDict(**processor_class.size), 3, **options)
        grid = rule.clip_grid(num_frames, height, width)
        assert (grid.rows * 14, grid.columns * 14) == wanted, (height, width)


@pytest.mark.parametrize("window_px", [112, 56, 60])
def test_windows_equal_those_of_the_model(window_px: int) -> None:
    rule = Qwen25VlRule.from_config({"vision_config": {"window_size": window_px}})
    config = Qwen2_5_VLConfig().vision_config
    for frames, rows, columns in np.random.default_rng(3).integers(1, 25, (60, 3)).tolist():
        grid = PatchGrid(frames, 2 * rows, 2 * columns)
        thw = torch.tensor([[frames, 2 * rows, 2 * columns]])
        _, bounds = get_vision_window_index(thw, 2, window_px, 14)
        lengths = bounds.diff().tolist()
        assert rule.window_lengths(grid) == lengths
        assert rule.num_windows(grid) == len(lengths)
        assert rule.sum_squared_windows(grid) == sum(length**2 for length in lengths)
        bounds, _ = get_vision_attention_seqlens(thw, config)
        assert grid.sum_squared_frames == sum(length**2 for length in bounds.diff().tolist())


def test_what_a_sample_and_the_layers_are_told() -> None:
    """A clip of 5 frames every half second: 3 temporal patches a second apart, 4 positions each."""
    rule = media_rule({"model_type": "qwen2_5_vl"})
    assert isinstance(rule, Qwen25VlRule)
    clip = rule.clip(5, 448, 448, 0.5)
    assert rule.patch_grid(clip) == PatchGrid(3, 32, 32)
    grid = rule.token_grid(clip)
    assert (grid.frames, grid.rows, grid.columns, grid.interval) == (3, 16, 16, 4.0)
    assert rule.sizes(clip) == {
        "num_frames": 6,
        "num_patches": 3 * 1024,
        "sum_squared_windows": 3 * 16 * 64**2,
        "sum_squared_frames": 3 * 1024**2,
    }
    assert rule.token_grid(rule.clip(5, 448, 448)).interval == pytest.approx(4 * 2 / 24)
    image = rule.image(60, 60, 3)
    assert rule.sizes(image) == {
        "num_tiles": 1,
        "num_patches": 16,
        "sum_squared_windows": 256,
        "sum_squared_frames": 256,
    }
    assert rule.token_grid(image).interval == 1.0
    assert rule.placeholders[Modality.VIDEO].token_id == 151656


def test_settings_are_taken_from_the_files_that_transformers_takes(tmp_path: Path) -> None:
    one, two, three = {"min_pixels": 1}, {"min_pixels": 2}, {"min_pixels": 3}
    assert processor_settings({}) == ({}, {})
    assert processor_settings({"preprocessor_config": one}) == (one, one)
    both = {"preprocessor_config": one, "video_preprocessor_config": two}
    assert processor_settings(both) == (one, two)
    joint = {"processor_config": {"image_processor": three}}
    assert processor_settings({**both, **joint}) == (three, two)
    for name, content in {**both, **joint}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).size["shortest_edge"] == 3
    found, _ = BaseVideoProcessor.get_video_processor_dict(tmp_path)
    assert found["min_pixels"] == 2
    (tmp_path / "video_preprocessor_config.json").unlink()
    found, _ = BaseVideoProcessor.get_video_processor_dict(tmp_path)
    assert found["min_pixels"] == 1


def test_impossible_media_are_refused() -> None:
    rule = Qwen25VlRule.from_config({})
    with pytest.raises(DataError, match="at least 1 x 1 pixel"):
        rule.image_grid(0, 5)
    with pytest.raises(DataError, match="at least 1 frame"):
        rule.clip_grid(0, 5, 5)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"preprocessor_config": {"patch_size": 16}}, "patch_size of the processor of images must be 14"),
        (
            {"video_preprocessor_config": {"temporal_patch_size": 1}},
            "temporal_patch_size of the processor of clips",
        ),
        ({"preprocessor_config": {"do_resize": False}}, "do_resize"),
        ({"preprocessor_config": {"min_pixels": 500, "max_pixels": 400}}, "min_pixels <= max_pixels"),
        ({"config": {"vision_config": {"patch_size": [14, 14]}}}, "patch_px"),
        ({"config": {"vision_config": {"window_size": 20}}}, "window_size"),
    ],
)
def test_contradictory_files_are_refused(files: dict[str, Any], message: str) -> None:
    config = files.pop("config", {})
    with pytest.raises(ConfigError, match=message):
        Qwen25VlRule.from_config(config, files)
