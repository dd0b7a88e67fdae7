"""Qwen2.5-VL samples from files: patches against the processors, refusals by the scan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import SizeDict

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.media import load_frames, load_image
from dflop_ds.data.probe import probe
from dflop_ds.errors import DataError
from dflop_ds.families import MediaKind
from tests.support.tiny_qwen2_5_vl import CLIP_SIZE, write_tiny_qwen2_5_vl
from tests.support.video_processor import qwen2_vl_video_source
from tests.unit.data.test_media import write_clip

ODD_SIZES = {"1x1": (1, 1), "16x16": (16, 16), "1x499": (1, 499), "1093x5": (1093, 5), "1x200": (1, 200)}
REFUSED = ["1093x5", "1x499"]


@pytest.fixture(scope="module")
def model_dir(tiny_demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen"), tiny_demo.model_dir)


@pytest.fixture(scope="module")
def demo_set(model_dir: Path, tiny_demo: DemoPaths) -> LlavaDataset:
    return from_pretrained_dir(model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)


def _turns(text: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]


@pytest.fixture(scope="module")
def odd_set(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LlavaDataset:
    """An image of every odd size, and clips of 1, 2 and 31 frames (five a second), one of them turned."""
    root = tmp_path_factory.mktemp("odd")
    records: list[dict[str, Any]] = []
    rng = np.random.default_rng(0)
    for name, (height, width) in ODD_SIZES.items():
        pixels = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{name}.png")
        records.append({"id": name, "image": f"{name}.png", "conversations": _turns("<image> What is it?")})
    for num_frames, rotation in ((1, 0), (2, 0), (31, 90)):
        name = f"clip{num_frames}"
        write_clip(root / f"{name}.mp4", num_frames, rotation=rotation)
        records.append({"id": name, "video": f"{name}.mp4", "conversations": _turns("What happens?")})
    (root / "odd.json").write_text(json.dumps(records))
    return from_pretrained_dir(
        model_dir, root / "odd.json", media_root=root, max_frames=31, frames_per_second=5.0
    )


def _usable(dataset: LlavaDataset) -> list[int]:
    return [index for index in range(len(dataset)) if dataset.sample_id(index) not in REFUSED]


@pytest.mark.parametrize("name", ["demo_set", "odd_set"])
def test_shapes_are_those_of_the_loaded_samples(name: str, request: pytest.FixtureRequest) -> None:
    dataset = request.getfixturevalue(name)
    pads = torch.tensor([place.token_id for place in dataset.rule.placeholders.values()])
    for index in _usable(dataset):
        shape, sample = dataset.shape(index), dataset[index]
        media_tokens = sum(item.num_tokens for item in sample.media)
        assert shape.llm_tokens == len(sample.input_ids)
        assert int(torch.isin(sample.input_ids, pads).sum()) == media_tokens
        assert shape.text_tokens == shape.llm_tokens - media_tokens
        assert sample.media_values.shape == (shape.num_patches, 3 * 2 * 14 * 14)
        assert shape.encoder_inputs == shape.num_patches == 4 * media_tokens
        grids = [item.extent[:3] for item in sample.media]
        assert shape.sum_squared_frames == sum(t * (h * w) ** 2 for t, h, w in grids)
        images = [item for item in sample.media if item.kind is MediaKind.WHOLE_IMAGE]
        assert shape.num_tiles == len(images)


@pytest.mark.parametrize("name", ["demo_set", "odd_set"])
def test_patches_of_images_equal_the_processor(name: str, request: pytest.FixtureRequest) -> None:
    dataset = request.getfixturevalue(name)
    num_images = 0
    for index in _usable(dataset):
        sample = dataset[index]
        blocks = sample.media_values.split([item.num_rows for item in sample.media])
        for item, block, path in zip(sample.media, blocks, dataset.media_paths(index), strict=True):
            if item.kind is MediaKind.CLIP:
                continue
            found = dataset.processor.image_processor(load_image(path), return_tensors="pt")
            assert torch.equal(block, found["pixel_values"])
            assert found["image_grid_thw"].tolist() == [list(item.extent[:3])]
            num_images += 1
    assert num_images >= 3


def _normalised(images: Any, frame: np.ndarray) -> torch.Tensor:
    """One frame by the steps of the image processor, within the budget of clips."""
    size = SizeDict(**CLIP_SIZE)
    pixels = images.resize(np.moveaxis(frame, -1, 0), size=size, resample=images.resample, factor=28)
    pixels = images.rescale(pixels, images.rescale_factor)
    return torch.from_numpy(images.normalize(pixels, images.image_mean, images.image_std))


def test_patches_of_clips_equal_the_video_processor(odd_set: LlavaDataset) -> None:
    """Frames are resized by Pillow, as for images; grouped, padded and cut they are by the processor."""
    video = object.__new__(qwen2_vl_video_source().Qwen2VLVideoProcessor)
    images = odd_set.processor.image_processor
    for index in _usable(odd_set):
        sample = odd_set[index]
        item = sample.media[0]
        if item.kind is not MediaKind.CLIP:
            continue
        num_frames = int(sample.sample_id.removeprefix("clip"))
        frames = load_frames(odd_set.media_paths(index)[0], range(num_frames))
        upright = (64, 48) if num_frames == 31 else (48, 64)
        assert frames[0].shape[:2] == upright
        alone = images(frames[0], size=CLIP_SIZE, input_data_format="channels_last")
        _, rows, columns = alone["image_grid_thw"][0]
        stacked = torch.stack([_normalised(images, frame) for frame in frames])[None]
        patches, *grid = video.patchify(stacked, patch_size=14, merge_size=2, temporal_patch_size=2)
        assert grid == list(item.extent[:3]) == [-(-num_frames // 2), rows, columns]
        torch.testing.assert_close(sample.media_values, patches[0].float(), rtol=0, atol=1e-6)
        # The processor: temporal patch over the sampled rate, here all of the five frames a second.
        interval = odd_set.rule.token_grid(item).interval
        assert interval == pytest.approx(odd_set.rule.tokens_per_second * 2 / 5)


def test_media_stand_between_start_and_end(demo_set: LlavaDataset) -> None:
    tokenizer = demo_set.tokenizer
    pad, start, end = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    for index in range(len(demo_set)):
        sample = demo_set[index]
        if [item.kind for item in sample.media] == [MediaKind.WHOLE_IMAGE]:
            where = torch.nonzero(sample.input_ids == pad).flatten()
            assert len(where) == sample.media[0].num_tokens == int(where[-1] - where[0]) + 1
            assert sample.input_ids[where[0] - 1] == start
            assert sample.input_ids[where[-1] + 1] == end
            return
    raise AssertionError("the demo must hold a lone image")


def test_what_the_processor_refuses_is_refused_by_the_scan(odd_set: LlavaDataset) -> None:
    result = probe(odd_set, max_tokens=100_000, broken="drop")
    assert sorted(sample.sample_id for sample in result.dropped) == REFUSED
    assert all("aspect ratio of at most 200" in sample.reason for sample in result.dropped)
    for sample_id in REFUSED:
        size = ODD_SIZES[sample_id]
        with pytest.raises(ValueError, match="aspect ratio"):
            odd_set.processor.image_processor(Image.new("RGB", size[::-1]))
    with pytest.raises(DataError, match=r"sample '1x499'.*aspect ratio of at most 200"):
        probe(odd_set, max_tokens=100_000)


def test_a_directory_with_one_joint_settings_file(
    model_dir: Path, odd_set: LlavaDataset, tmp_path: Path
) -> None:
    """As ``Qwen2_5_VLProcessor.save_pretrained`` writes it."""
    copied = shutil.copytree(model_dir, tmp_path / "model")
    settings = {"image_processor": json.loads((copied / "preprocessor_config.json").read_text())}
    settings["video_processor"] = json.loads((copied / "video_preprocessor_config.json").read_text())
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (copied / name).unlink()
    (copied / "processor_config.json").write_text(json.dumps(settings))
    options = {"media_root": odd_set.reader.root, "max_frames": 31, "frames_per_second": 5.0}
    joint = from_pretrained_dir(copied, odd_set.records_path, **options)
    assert joint.rule == odd_set.rule
    for index in _usable(odd_set):
        assert torch.equal(joint[index].media_values, odd_set[index].media_values)
