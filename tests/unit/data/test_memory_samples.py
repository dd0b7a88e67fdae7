"""Samples that are in memory, or in data sets of ``datasets``, against the same samples as files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.hub_records import HubRecords, MemoryRecords, as_records, load_hub_set
from dflop_ds.data.media import clip_info, load_frames, load_image
from dflop_ds.data.memory import MediaBytes, media_value
from dflop_ds.data.probe import probe
from dflop_ds.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def plain(tiny_demo: DemoPaths) -> LlavaDataset:
    return from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)


def records_with(demo: DemoPaths, change: Any) -> list[dict[str, Any]]:
    """The demo's records; every image path is replaced by what ``change`` makes of the file."""
    records = []
    for line in Path(demo.train_path).read_text().splitlines():
        record = json.loads(line)
        if isinstance(record.get("image"), str):
            record["image"] = change(Path(demo.media_root) / record["image"])
        elif "image" in record:
            record["image"] = [change(Path(demo.media_root) / path) for path in record["image"]]
        records.append(record)
    return records


def opened(demo: DemoPaths, records: Any) -> LlavaDataset:
    return from_pretrained_dir(demo.model_dir, records, media_root=demo.media_root)


def assert_same(found: LlavaDataset, plain: LlavaDataset) -> None:
    assert len(found) == len(plain)
    for index in range(len(plain)):
        assert found.shape(index) == plain.shape(index)
        one, other = found[index], plain[index]
        assert torch.equal(one.input_ids, other.input_ids)
        assert one.media_values is not None
        assert other.media_values is not None
        assert torch.equal(one.media_values, other.media_values)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(load_image, id="PIL"),
        pytest.param(lambda path: np.asarray(load_image(path)), id="array"),
        pytest.param(lambda path: {"bytes": path.read_bytes(), "path": None}, id="bytes"),
        pytest.param(lambda path: {"bytes": None, "path": str(path)}, id="path"),
    ],
)
def test_images_in_memory_are_the_files(change: Any, tiny_demo: DemoPaths, plain: LlavaDataset) -> None:
    assert_same(opened(tiny_demo, MemoryRecords(records_with(tiny_demo, change))), plain)


def hub_set(demo: DemoPaths) -> Any:
    """Encoded images in a column of lists, as ``datasets`` stores them; clips by path."""
    records = records_with(demo, lambda path: {"bytes": path.read_bytes(), "path": str(path)})
    for record in records:
        image = record.get("image", [])
        record["image"] = image if isinstance(image, list) else [image]
        record.setdefault("video", None)
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "image": datasets.List(datasets.Image()),
            "video": datasets.Value("string"),
            "conversations": datasets.List(
                {"from": datasets.Value("string"), "value": datasets.Value("string")}
            ),
        }
    )
    keys = list(features)
    return datasets.Dataset.from_list([{key: r.get(key) for key in keys} for r in records], features=features)


def test_a_map_style_set_is_the_file(tiny_demo: DemoPaths, plain: LlavaDataset, tmp_path: Path) -> None:
    hub = hub_set(tiny_demo)
    assert_same(opened(tiny_demo, as_records(hub)), plain)
    hub.save_to_disk(str(tmp_path / "saved"))
    hub.to_parquet(str(tmp_path / "train.parquet"))
    for path in (tmp_path / "saved", tmp_path / "train.parquet"):
        found = opened(tiny_demo, str(path))
        assert [found.sample_id(i) for i in range(3)] == [plain.sample_id(i) for i in range(3)]
        assert found.fingerprint() == opened(tiny_demo, path).fingerprint()
    loader = DataLoader(opened(tiny_demo, str(tmp_path / "saved")), batch_size=None, num_workers=1)
    assert [sample.sample_id for sample in loader] == [plain.sample_id(i) for i in range(len(plain))]


def test_shapes_come_from_headers_and_are_kept(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    dataset = opened(tiny_demo, as_records(hub_set(tiny_demo)))
    cache = tmp_path / "shapes.npz"
    first = probe(dataset, max_tokens=10**6, cache=cache)
    calls: list[int] = []
    dataset.shape = lambda index: calls.append(index)  # type: ignore[method-assign, assignment, return-value]
    again = probe(dataset, max_tokens=10**6, cache=cache)
    assert not calls
    assert [again.table[i] for i in range(24)] == [first.table[i] for i in range(24)]


def test_frames_in_memory_are_a_clip(tiny_demo: DemoPaths, plain: LlavaDataset) -> None:
    index = next(i for i in range(len(plain)) if "video" in plain.record(i))
    path = plain.media_paths(index)[0]
    frames = load_frames(path, list(range(clip_info(path).num_frames)))
    for clip in (np.stack(frames), [Image.fromarray(frame) for frame in frames]):
        record = {**plain.record(index), "video": clip}
        dataset = from_pretrained_dir(
            tiny_demo.model_dir, MemoryRecords([record]), media_root=".", max_frames=4
        )
        # Four of all frames, evenly spaced: the rate of frames in memory is not known.
        picked = [frames[k * len(frames) // 4] for k in range(4)]
        (item,) = dataset.media_items(0)
        values = dataset[0].media_values
        assert item.num_rows == 4
        assert values is not None
        assert torch.equal(values, torch.cat(dataset.processor.rows((item,), [picked])))


def test_a_recording_in_memory_is_mono_at_the_wanted_rate() -> None:
    from dflop_ds.data.audio import resample

    seconds = np.arange(8000) / 8000
    tone = np.sin(2 * np.pi * 200 * seconds).astype(np.float32)
    value = media_value({"array": np.stack([tone, 0 * tone]), "sampling_rate": 8000}, "'audio'", False)
    found = resample(value, 16000)
    expected = 0.5 * np.sin(2 * np.pi * 200 * np.arange(16000) / 16000)
    assert found.shape == (16000,)
    assert np.abs(found - expected)[200:-200].max() < 1e-3
    assert np.array_equal(resample(value, 16000, 500), found[:500])


@pytest.mark.parametrize(
    "value",
    [3, np.zeros((4, 4), dtype=np.float32), {"bytes": None}, {"array": [0.0]}, np.zeros((1, 1, 1, 1))],
)
def test_what_is_no_medium_is_named(value: Any, tiny_demo: DemoPaths) -> None:
    record = {"id": "odd", "image": value, "conversations": [{"from": "human", "value": "<image>"}]}
    with pytest.raises(DataError, match=r"'odd'.*'image' must be"):
        opened(tiny_demo, MemoryRecords([record])).shape(0)


def test_damaged_bytes_name_the_sample(tiny_demo: DemoPaths) -> None:
    record = {
        "id": "odd",
        "image": {"bytes": b"no image", "path": "a.png"},
        "conversations": [{"from": "human", "value": "<image>"}],
    }
    dataset = opened(tiny_demo, MemoryRecords([record]))
    with pytest.raises(DataError, match=r"'odd'.*image a.png must be readable"):
        dataset.shape(0)
    assert "no image" not in repr(MediaBytes("a.png", b"no image"))


def test_unusable_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"column .conversations.*'text'"):
        HubRecords(datasets.Dataset.from_list([{"text": "a"}]))
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"conversations": []}])})
    with pytest.raises(DataError, match=r"found the splits \['train'\]; pass or save one"):
        as_records(splits)
    with pytest.raises(ConfigError, match="found int"):
        as_records(3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty must be a data set that datasets can read"):
        load_hub_set(tmp_path / "empty")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"bad.parquet must be a data set"):
        load_hub_set(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"found .*mix.yaml"):
        load_hub_set(tmp_path / "mix.yaml")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"dflop_ds\[datasets\]"):
        load_hub_set(tmp_path / "empty")
