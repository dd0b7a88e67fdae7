"""Records that are valid JSON and still unusable: the sample is named, and can be dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.probe import probe
from dflop_ds.errors import DataError

QUESTION = {"from": "human", "value": "What?"}
ANSWER = {"from": "gpt", "value": "That."}
GOOD = {"id": "good", "conversations": [QUESTION, ANSWER]}

HOSTILE: dict[str, dict[str, Any]] = {
    "answer-first": {"conversations": [ANSWER, QUESTION, ANSWER]},
    "answers-only": {"conversations": [ANSWER]},
    "nul-path": {"image": "a\0b.jpg", "conversations": [QUESTION, ANSWER]},
    "surrogate-path": {"image": "\ud800.jpg", "conversations": [QUESTION, ANSWER]},
    "surrogate-text": {"conversations": [QUESTION, {"from": "gpt", "value": "\ud800"}]},
}


def dataset_of(records: list[str], demo: DemoPaths, root: Path) -> LlavaDataset:
    path = root / "train.jsonl"
    path.write_text("\n".join(records) + "\n")
    return from_pretrained_dir(demo.model_dir, path, media_root=demo.media_root)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_record_is_named_or_dropped(name: str, tiny_demo: DemoPaths, tmp_path: Path) -> None:
    records = [json.dumps(GOOD), json.dumps({"id": name, **HOSTILE[name]})]
    dataset = dataset_of(records, tiny_demo, tmp_path)
    with pytest.raises(DataError, match=f"sample '{name}'"):
        probe(dataset, max_tokens=1000, progress=False)
    found = probe(dataset, max_tokens=1000, broken="drop", progress=False)
    assert found.table.sample_ids == ["good"]
    assert [dropped.sample_id for dropped in found.dropped] == [name]


def test_deeply_nested_line_is_named(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    dataset = dataset_of([json.dumps(GOOD), "[" * 100_000], tiny_demo, tmp_path)
    with pytest.raises(DataError, match="line 2"):
        probe(dataset, max_tokens=1000, progress=False)


@pytest.mark.parametrize("content", [b"\x93NUMPY garbage", b"PK\x03\x04 cut", b""])
def test_a_damaged_cache_costs_only_time(content: bytes, tiny_demo: DemoPaths, tmp_path: Path) -> None:
    dataset = dataset_of([json.dumps(GOOD)], tiny_demo, tmp_path)
    cache = tmp_path / "shapes.npz"
    probe(dataset, max_tokens=1000, cache=cache, progress=False)
    whole = cache.read_bytes()
    for damaged in (
        content,
        whole[: len(whole) // 2],
        whole[:200] + bytes(b ^ 255 for b in whole[200:260]) + whole[260:],
    ):
        cache.write_bytes(damaged)
        assert probe(dataset, max_tokens=1000, cache=cache, progress=False).table.sample_ids == ["good"]


def test_a_cache_that_cannot_be_written_is_not_needed(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    dataset = dataset_of([json.dumps(GOOD)], tiny_demo, tmp_path)
    (tmp_path / "file").write_text("")
    found = probe(dataset, max_tokens=1000, cache=tmp_path / "file" / "shapes.npz", progress=False)
    assert found.table.sample_ids == ["good"]
    assert probe(dataset, max_tokens=1000, cache=tmp_path, progress=False).table.sample_ids == ["good"]
