"""Loading samples: pixels against the image processor, shapes against what is loaded."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import LlavaOnevisionForConditionalGeneration

from dflop_ds.data import reader as reader_module
from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.layout import MediaKind
from dflop_ds.data.media import clip_info, load_frames, load_image
from dflop_ds.errors import ConfigError, DataError

SETTINGS: dict[str, Any] = {"frames_per_second": 2.0, "max_frames": 8}


@pytest.fixture(scope="module")
def demo_set(tiny_demo: DemoPaths) -> LlavaDataset:
    return from_pretrained_dir(
        tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root, **SETTINGS
    )


def _open(demo: DemoPaths, records: Path, content: str, **options: Any) -> LlavaDataset:
    records.write_text(content)
    return from_pretrained_dir(demo.model_dir, records, media_root=demo.media_root, **options)


def _with(demo_set: LlavaDataset, *kinds: MediaKind) -> list[int]:
    found = [i for i in range(len(demo_set)) if {item.kind for item in demo_set.media_items(i)} == set(kinds)]
    assert found, "the demo must hold such a sample"
    return found


def test_shapes_are_those_of_the_loaded_samples(demo_set: LlavaDataset) -> None:
    for index in range(len(demo_set)):
        shape, sample = demo_set.shape(index), demo_set[index]
        media_tokens = sum(item.num_tokens for item in sample.media)
        assert (sample.index, sample.sample_id) == (index, shape.sample_id)
        assert shape.llm_tokens == len(sample.input_ids) == len(sample.labels)
        assert shape.text_tokens == shape.llm_tokens - media_tokens
        assert shape.target_tokens == int((sample.labels[1:] != -100).sum()) > 0
        assert sample.media_values is not None
        assert len(sample.media_values) == shape.encoder_inputs == shape.num_tiles + shape.num_frames
        assert sample.media_values.dtype == torch.float32
        ids = torch.tensor([demo_set.rule.image_token_id, demo_set.rule.video_token_id])
        assert int(torch.isin(sample.input_ids, ids).sum()) == media_tokens


@pytest.mark.parametrize("kind", [MediaKind.TILED_IMAGE, MediaKind.WHOLE_IMAGE])
def test_image_pixels_equal_the_processor(demo_set: LlavaDataset, kind: MediaKind) -> None:
    for index in _with(demo_set, kind):
        images = [load_image(path) for path in demo_set.media_paths(index)]
        image_processor = demo_set.processor.image_processor
        expected = image_processor([images], return_tensors="pt")["pixel_values"].flatten(0, 1)
        pixels = demo_set[index].media_values
        assert pixels is not None
        assert torch.equal(pixels, expected)
        num_tiles = [1] * len(images) if kind is MediaKind.WHOLE_IMAGE else [len(expected)]
        assert [item.num_inputs for item in demo_set.media_items(index)] == num_tiles


def test_clip_pixels_are_resized_frames(demo_set: LlavaDataset) -> None:
    """Neither padded nor cut: bicubic resizing to the square, then scaling from [0, 255] to [-1, 1]."""
    for index in _with(demo_set, MediaKind.CLIP):
        path, (item,) = demo_set.media_paths(index)[0], demo_set.media_items(index)
        total = clip_info(path).num_frames
        frames = load_frames(path, [k * total // item.num_inputs for k in range(item.num_inputs)])
        resized = [np.asarray(Image.fromarray(f).resize((70, 70), Image.Resampling.BICUBIC)) for f in frames]
        expected = (np.stack(resized).transpose(0, 3, 1, 2) / 255.0 - 0.5) / 0.5
        pixels = demo_set[index].media_values
        assert pixels is not None
        assert np.allclose(pixels.numpy(), expected, atol=1e-5)


def test_the_model_accepts_every_sample(demo_set: LlavaDataset, tiny_demo: DemoPaths) -> None:
    """transformers' own forward checks that placeholders and features are equally many."""
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(tiny_demo.model_dir).eval()
    for index in range(len(demo_set)):
        sample = demo_set[index]
        inputs: dict[str, torch.Tensor] = {}
        images = [item for item in sample.media if item.kind is not MediaKind.CLIP]
        assert sample.media_values is not None
        if images and len(images) == len(sample.media):
            inputs["pixel_values"] = torch.stack(sample.media_values.split([i.num_inputs for i in images]))
            inputs["image_sizes"] = torch.tensor([list(item.extent) for item in images])
            inputs["batch_num_images"] = torch.tensor([len(images)])
        elif sample.media:
            inputs["pixel_values_videos"] = sample.media_values[None]
        with torch.no_grad():
            logits = model(input_ids=sample.input_ids[None], **inputs).logits
        assert torch.isfinite(logits).all()


def test_images_and_clips_mix_in_placeholder_order(
    demo_set: LlavaDataset, tiny_demo: DemoPaths, tmp_path: Path
) -> None:
    image = demo_set.media_paths(_with(demo_set, MediaKind.TILED_IMAGE)[0])[0]
    clip = demo_set.media_paths(_with(demo_set, MediaKind.CLIP)[0])[0]
    turns = [{"from": "human", "value": "<video> and <image>"}, {"from": "gpt", "value": "yes"}]
    record = {"id": 7, "image": str(image), "video": str(clip), "conversations": turns}
    mixed = _open(tiny_demo, tmp_path / "mixed.json", json.dumps([record]), **SETTINGS)
    sample = mixed[0]
    assert [item.kind for item in sample.media] == [MediaKind.CLIP, MediaKind.TILED_IMAGE]
    assert sample.sample_id == "7"
    expected = mixed.processor.image_processor([[load_image(image)]], return_tensors="pt")["pixel_values"][0]
    assert sample.media_values is not None
    assert torch.equal(sample.media_values[sample.media[0].num_inputs :], expected)


def test_view_without_media_decodes_nothing(demo_set: LlavaDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("pixels were decoded")

    full = demo_set[0]
    monkeypatch.setattr(reader_module, "load_image", refuse)
    monkeypatch.setattr(reader_module, "load_frames", refuse)
    light = demo_set.without_media()
    samples = [light[index] for index in range(len(light))]
    assert all(sample.media_values is None for sample in samples)
    assert torch.equal(samples[0].input_ids, full.input_ids)
    assert demo_set.load_media


def test_json_and_json_lines_are_alike(demo_set: LlavaDataset, tiny_demo: DemoPaths, tmp_path: Path) -> None:
    records = [demo_set.record(index) for index in range(len(demo_set))]
    for record in records[:2]:
        del record["id"]
    as_list = _open(tiny_demo, tmp_path / "list.json", json.dumps(records), **SETTINGS)
    lines = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    as_lines = _open(tiny_demo, tmp_path / "lines.jsonl", lines, **SETTINGS)
    assert len(as_list) == len(as_lines) == len(records)
    assert [as_list.sample_id(i) for i in range(3)] == ["record 0", "record 1", "demo-00002"]
    assert [as_lines.sample_id(i) for i in range(3)] == ["line 1", "line 3", "demo-00002"]
    for index in range(len(records)):
        assert as_list.record(index) == as_lines.record(index)


def test_an_id_that_is_no_unicode_can_still_be_written(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    record = {"id": "\ud800x", "conversations": turns}
    data = _open(tiny_demo, tmp_path / "r.jsonl", json.dumps(record))
    assert data.sample_id(0) == data[0].sample_id == "\\ud800x"


def test_worker_processes_load_the_same(demo_set: LlavaDataset) -> None:
    light = demo_set.without_media()
    light.record(0)  # the parent's open file must not be shared
    loader = DataLoader(light, batch_size=None, num_workers=2)
    for index, sample in enumerate(loader):
        assert sample.sample_id == demo_set.sample_id(index)
        assert torch.equal(sample.input_ids, light[index].input_ids)


def test_data_set_can_be_pickled_for_spawned_workers(demo_set: LlavaDataset) -> None:
    demo_set.record(0)
    again = pickle.loads(pickle.dumps(demo_set))
    assert again.record(5) == demo_set.record(5)
    assert again.fingerprint() == demo_set.fingerprint()


def test_damaged_media_name_sample_file_and_remedy(
    demo_set: LlavaDataset, tiny_demo: DemoPaths, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.png"
    source = next(
        path for path in (tiny_demo.media_root / "images").glob("*.png") if path.stat().st_size > 4000
    )
    cut.write_bytes(source.read_bytes()[:3000])
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "yes"}]
    record = {"id": "torn", "image": str(cut), "conversations": turns}
    torn = _open(tiny_demo, tmp_path / "torn.json", json.dumps([record]))
    assert torn.shape(0).num_tiles >= 2
    for load in (torn.__getitem__, torn.check_media):
        with pytest.raises(DataError, match=r"'torn'.*cut\.png.*\"scan\": \"decode\"") as caught:
            load(0)
        assert caught.value.sample_id == "torn"
    for index in range(len(demo_set)):
        demo_set.check_media(index)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{}", "must hold a list"),
        ("a.json", "[", "must be valid JSON"),
        ("a.csv", "a,b", ".json or .jsonl file"),
    ],
)
def test_unreadable_record_files_are_refused(
    tiny_demo: DemoPaths, tmp_path: Path, name: str, content: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _open(tiny_demo, tmp_path / name, content)


def test_missing_record_file_and_bad_line_are_named(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must exist"):
        from_pretrained_dir(tiny_demo.model_dir, tmp_path / "gone.jsonl", media_root=tmp_path)
    bad = _open(tiny_demo, tmp_path / "bad.jsonl", '{"id": "good"}\n{"id": \n')
    assert [bad.sample_id(0), bad.sample_id(1)] == ["good", "line 2"]
    with pytest.raises(DataError, match=r"sample 'line 2'.*bad\.jsonl must hold valid JSON"):
        bad.shape(1)


def test_model_directories_that_do_not_fit_are_refused(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    def attempt(message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            from_pretrained_dir(
                tmp_path / "model", tiny_demo.train_path, media_root=tiny_demo.media_root, **options
            )

    attempt(r"found no config\.json, preprocessor_config\.json")
    shutil.copytree(tiny_demo.model_dir, tmp_path / "model")
    attempt("max_frames >= 1", max_frames=0)
    settings_path = tmp_path / "model" / "preprocessor_config.json"
    settings = json.loads(settings_path.read_text())
    settings_path.write_text(json.dumps({**settings, "image_grid_pinpoints": [[70, 70]]}))
    attempt("image_grid_pinpoints")
    settings_path.write_text(json.dumps({**settings, "size": {"height": 56, "width": 56}}))
    attempt("must resize to the encoder's 70 x 70 px")
    settings_path.write_text("{")
    attempt("must hold a readable configuration")
