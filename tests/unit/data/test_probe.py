"""Scanning a data set: broken and oversized samples, policies and the cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.probe import ProbeResult, probe
from dflop_ds.errors import ConfigError, DataError

PLENTY = 10**6


@pytest.fixture
def copied(tiny_demo: DemoPaths, tmp_path: Path) -> LlavaDataset:
    """Demo data that a test may damage."""
    shutil.copytree(tiny_demo.media_root, tmp_path / "data")
    return from_pretrained_dir(
        tiny_demo.model_dir, tmp_path / "data" / "train.jsonl", media_root=tmp_path / "data"
    )


def _with_media(dataset: LlavaDataset, key: str) -> list[int]:
    return [index for index in range(len(dataset)) if key in dataset.record(index)]


def _equal(first: ProbeResult, second: ProbeResult) -> bool:
    same_shapes = [first.table[i] for i in range(len(first.table))] == [
        second.table[i] for i in range(len(second.table))
    ]
    return same_shapes and np.array_equal(first.rows, second.rows) and first.dropped == second.dropped


def _damage(dataset: LlavaDataset) -> dict[str, int]:
    """One missing file, one file without a header, one cut behind its header."""
    pngs = [
        index
        for index in _with_media(dataset, "image")
        if (path := dataset.media_paths(index)[0]).suffix == ".png" and path.stat().st_size > 4000
    ]
    clip, missing = _with_media(dataset, "video")[0], _with_media(dataset, "image")[0]
    cut = next(index for index in pngs if index != missing)
    dataset.media_paths(missing)[0].unlink()
    dataset.media_paths(clip)[0].write_bytes(b"no clip")
    path = dataset.media_paths(cut)[0]
    path.write_bytes(path.read_bytes()[:3000])
    return {"missing": missing, "clip": clip, "cut": cut}


def test_sound_data_are_kept_whole(copied: LlavaDataset) -> None:
    result = probe(copied, max_tokens=PLENTY, scan="decode")
    assert result.rows.tolist() == list(range(len(copied)))
    assert result.rows.dtype == np.int64
    assert result.dropped == ()
    assert [result.table[i] for i in range(len(copied))] == [copied.shape(i) for i in range(len(copied))]


def test_result_does_not_depend_on_the_number_of_processes(copied: LlavaDataset) -> None:
    _damage(copied)
    options: dict[str, Any] = {"max_tokens": 400, "broken": "drop", "oversized": "drop"}
    assert _equal(probe(copied, **options), probe(copied, processes=2, **options))


@pytest.mark.parametrize("scan", ["headers", "decode"])
def test_broken_media_are_dropped_with_a_log(
    copied: LlavaDataset, scan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage behind a sound header shows only when media are decoded."""
    damaged = _damage(copied)
    expected = sorted({damaged["missing"], damaged["clip"], *([damaged["cut"]] if scan == "decode" else [])})
    with caplog.at_level(logging.WARNING):
        result = probe(copied, max_tokens=PLENTY, broken="drop", scan=scan)
    assert [sample.index for sample in result.dropped] == expected
    assert set(result.rows.tolist()) == set(range(len(copied))) - set(expected)
    for sample in result.dropped:
        assert sample.sample_id == copied.sample_id(sample.index)
        assert str(copied.media_paths(sample.index)[0]) in sample.reason
        assert f"sample {sample.sample_id!r}" in caplog.text


def test_all_problems_are_in_one_error(copied: LlavaDataset) -> None:
    damaged = _damage(copied)
    with pytest.raises(DataError) as caught:
        probe(copied, max_tokens=PLENTY, scan="decode")
    message = str(caught.value)
    assert "found 3 that are not" in message
    assert all(f"[{index}] sample {copied.sample_id(index)!r}" in message for index in damaged.values())


def test_long_error_lists_ten(copied: LlavaDataset) -> None:
    with pytest.raises(DataError, match=f"found {len(copied)} that are not") as caught:
        probe(copied, max_tokens=1)
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if line.startswith("  [")]) == 10
    assert lines[-1] == f"  ... and {len(copied) - 10} more"
    assert caught.value.sample_id == copied.sample_id(0)


def test_oversized_samples(copied: LlavaDataset) -> None:
    shapes = [copied.shape(index) for index in range(len(copied))]
    by_tokens = [i for i, shape in enumerate(shapes) if shape.llm_tokens > 300]
    by_inputs = [i for i, shape in enumerate(shapes) if shape.encoder_inputs > 4]
    assert by_tokens
    assert by_inputs
    result = probe(copied, max_tokens=300, oversized="drop")
    assert [sample.index for sample in result.dropped] == by_tokens
    assert "at most 300 LLM tokens" in result.dropped[0].reason
    result = probe(copied, max_tokens=PLENTY, max_encoder_inputs=4, oversized="drop")
    assert [sample.index for sample in result.dropped] == by_inputs
    with pytest.raises(DataError, match="at most 4 encoder inputs are allowed"):
        probe(copied, max_tokens=PLENTY, max_encoder_inputs=4)


def test_policies_are_independent(copied: LlavaDataset) -> None:
    damaged = _damage(copied)
    with pytest.raises(DataError, match="LLM tokens") as caught:
        probe(copied, max_tokens=300, broken="drop")
    assert copied.sample_id(damaged["missing"]) not in str(caught.value)


def test_nothing_left_is_an_error(copied: LlavaDataset) -> None:
    with pytest.raises(DataError, match="at least one usable sample"):
        probe(copied, max_tokens=1, oversized="drop")


def test_many_drops_are_counted_not_listed(copied: LlavaDataset, caplog: pytest.LogCaptureFixture) -> None:
    shortest = min(copied.shape(index).llm_tokens for index in range(len(copied)))
    with caplog.at_level(logging.WARNING):
        result = probe(copied, max_tokens=shortest, oversized="drop")
    num_listed = sum(record.getMessage().startswith("dropped [") for record in caplog.records)
    assert len(result.dropped) > 20
    assert num_listed == 20
    assert f"dropped {len(result.dropped)} samples in all" in caplog.text


def test_samples_without_targets_are_kept_and_counted(
    tiny_demo: DemoPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes"}]
    records = [{"conversations": turns[:1]}, {"conversations": turns}, {"conversations": turns[:1]}]
    (tmp_path / "few.json").write_text(json.dumps(records))
    dataset = from_pretrained_dir(tiny_demo.model_dir, tmp_path / "few.json", media_root=tmp_path)
    with caplog.at_level(logging.WARNING):
        result = probe(dataset, max_tokens=PLENTY)
    assert len(result.table) == 3
    assert [record.getMessage() for record in caplog.records if "supervised" in record.getMessage()] == [
        "2 of 3 samples have no supervised token; they add no gradient."
    ]


class _Counter:
    """Counts how many samples are really looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indices: list[int] = []
        original = LlavaDataset.shape

        def shape(dataset: LlavaDataset, index: int) -> Any:
            self.indices.append(index)
            return original(dataset, index)

        monkeypatch.setattr(LlavaDataset, "shape", shape)


def test_cache_saves_the_scan_and_notices_changes(
    copied: LlavaDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = _damage(copied)
    cache = tmp_path / "cache" / "shapes.npz"
    options: dict[str, Any] = {"max_tokens": PLENTY, "broken": "drop", "cache": cache}
    first = probe(copied, **options)
    counter = _Counter(monkeypatch)
    assert _equal(probe(copied, **options), first)
    assert counter.indices == sorted([damaged["missing"], damaged["clip"]])
    counter.indices.clear()
    changed = next(i for i in _with_media(copied, "image") if i not in damaged.values())
    os.utime(copied.media_paths(changed)[0], ns=(1, 1))
    assert _equal(probe(copied, **options), first)
    assert changed in counter.indices
    assert len(counter.indices) == 3
    counter.indices.clear()
    other_limits = probe(copied, **{**options, "max_tokens": 300, "oversized": "drop"})
    assert len(other_limits.rows) < len(first.rows)
    assert len(counter.indices) == 2
    assert [path.name for path in cache.parent.iterdir()] == ["shapes.npz"]


def test_only_new_and_edited_records_are_looked_at(
    copied: LlavaDataset, tiny_demo: DemoPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / "train.jsonl"
    options: dict[str, Any] = {"max_tokens": PLENTY, "cache": tmp_path / "shapes.npz"}
    probe(copied, **options)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    added = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes"}]}
    edited = {**records[2], "id": "edited"}
    path.write_text("".join(json.dumps(r) + "\n" for r in [added, *records[1:2], edited, *records[3:]]))
    changed = from_pretrained_dir(tiny_demo.model_dir, path, media_root=path.parent)
    fresh = probe(changed, max_tokens=PLENTY)
    counter = _Counter(monkeypatch)
    assert _equal(probe(changed, **options), fresh)
    assert counter.indices == [0, 2]
    counter.indices.clear()
    path.write_text("".join(json.dumps(r) + "\n" for r in [*records[3:], edited]))
    moved = from_pretrained_dir(tiny_demo.model_dir, path, media_root=path.parent)
    assert probe(moved, **options).table.sample_ids == [str(r["id"]) for r in records[3:]] + ["edited"]
    assert counter.indices == []


@pytest.mark.parametrize("change", ["settings", "scan", "damage"])
def test_outdated_cache_is_not_used(
    copied: LlavaDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    options: dict[str, Any] = {"max_tokens": PLENTY, "cache": tmp_path / "shapes.npz"}
    first = probe(copied, **options)
    if change == "settings":
        copied.reader.max_frames += 1
    elif change == "scan":
        options["scan"] = "decode"
    else:
        (tmp_path / "shapes.npz").write_bytes(b"PK\x03\x04 no archive")
    counter = _Counter(monkeypatch)
    assert _equal(probe(copied, **options), first)
    assert counter.indices == list(range(len(copied)))


@pytest.mark.parametrize(
    "options",
    [
        {"broken": "ignore"},
        {"oversized": "cut"},
        {"scan": "full"},
        {"max_encoder_inputs": 0},
        {"processes": 0},
    ],
)
def test_unknown_options_are_refused(copied: LlavaDataset, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        probe(copied, max_tokens=5, **options)
