"""Mixtures: sampling rules against hand-counted files, weights, ids and media folders."""

from __future__ import annotations

import collections
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.records import open_records
from dflop_ds.errors import DataError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """``a.json`` with 10 records and ``b.jsonl`` with 7."""
    (tmp_path / "a.json").write_text(json.dumps([{"id": f"a{i}", "image": "x.png"} for i in range(10)]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"id": f"b{i}"}) + "\n" for i in range(7)))
    return tmp_path


def mixed(folder: Path, *sources: dict[str, Any], seed: int = 0) -> list[str]:
    path = folder / "mixture.json"
    path.write_text(json.dumps({"datasets": list(sources)}))
    records = open_records(path, seed)
    return [records[i]["id"] for i in range(len(records))]


def a(rule: str = "all", **more: Any) -> dict[str, Any]:
    return {"json_path": "a.json", "sampling_strategy": rule, **more}


@pytest.mark.parametrize(
    ("rule", "count"),
    [("all", 10), ("first:3", 3), ("first:25%", 3), ("first:100%", 10), ("first:99", 10), ("first:0", 0)],
)
def test_first_takes_the_beginning_and_rounds_percent_up(files: Path, rule: str, count: int) -> None:
    expected = [f"a{i}" for i in range(count)] + [f"b{i}" for i in range(7)]
    assert mixed(files, a(rule), {"json_path": "b.jsonl"}) == expected


@pytest.mark.parametrize(("rule", "count"), [("end:3", 3), ("end:25%", 3), ("end:99", 10), ("end:0", 0)])
def test_end_takes_the_last_records_in_their_order(files: Path, rule: str, count: int) -> None:
    expected = [f"a{i}" for i in range(10 - count, 10)] + [f"b{i}" for i in range(7)]
    assert mixed(files, a(rule), {"json_path": "b.jsonl"}) == expected


@pytest.mark.parametrize(("rule", "count"), [("random:4", 4), ("random:31%", 4), ("random:99", 10)])
def test_random_draws_without_repeats_by_the_seed_alone(files: Path, rule: str, count: int) -> None:
    drawn = [mixed(files, a(rule), seed=seed) for seed in range(12)]
    for ids in drawn:
        assert len(set(ids)) == len(ids) == count
        assert set(ids) <= {f"a{i}" for i in range(10)}
    assert drawn == [mixed(files, a(rule), seed=seed) for seed in range(12)]
    assert (len({tuple(ids) for ids in drawn}) > 1) == (count < 10)
    # What the first source draws does not change what the second one draws.
    firsts = ({"json_path": "b.jsonl"}, {"json_path": "b.jsonl", "weight": 2.0})
    later = [mixed(files, first, a(rule))[-count:] for first in firsts]
    assert later[0] == later[1]


@pytest.mark.parametrize(("weight", "total"), [(2.0, 20), (0.3, 3), (1.75, 18), (0.04, 0)])
def test_weight_is_the_mean_number_of_occurrences(files: Path, weight: float, total: int) -> None:
    ids = mixed(files, a(weight=weight), {"json_path": "b.jsonl"})
    counts = collections.Counter(name for name in ids if name[0] == "a")
    assert sum(counts.values()) == total
    assert set(counts.values()) <= {int(weight), int(weight) + 1}


def test_yaml_as_llava_writes_it(files: Path) -> None:
    path = files / "mix.yaml"
    path.write_text(
        "datasets:\n- json_path: a.json\n  sampling_strategy: first:20%\n"
        "- json_path: b.jsonl\n  sampling_strategy: all\n"
    )
    records = open_records(path)
    assert [records[i]["id"] for i in range(len(records))] == ["a0", "a1", *(f"b{i}" for i in range(7))]
    assert records.fallback_id(1) == "a.json record 1"
    assert records.fallback_id(3) == "b.jsonl line 2"


def test_media_of_a_source_start_at_its_own_folder(files: Path) -> None:
    path = files / "mixture.json"
    sources = [a("first:1", media_root="photos"), a("first:1"), a("first:1", media_root="/abs")]
    path.write_text(json.dumps({"datasets": sources}))
    records = open_records(path)
    images = [records[i]["image"] for i in range(3)]
    assert images == [str(files / "photos" / "x.png"), "x.png", "/abs/x.png"]


def test_a_relative_mixture_finds_media_in_the_folder_of_its_source(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "mixture.json").write_text(json.dumps({"datasets": [a("first:1", media_root="photos")]}))
    monkeypatch.chdir(files.parent)
    path = Path(files.name) / "mixture.json"
    image = open_records(path)[0]["image"]
    assert path.parent / image == files / "photos" / "x.png"  # joined as the reader of media does


def test_every_problem_is_named_at_once(files: Path) -> None:
    with pytest.raises(DataError) as caught:
        mixed(files, a("first:-1"), {"json_pth": "a.json"}, a("random:101%"), a("first:2.5"), a(weight=0.0))
    text = str(caught.value)
    for number, found in enumerate(["first:-1", "json_path", "random:101%", "first:2.5", "weight"]):
        assert f"datasets[{number}]" in text
        assert found in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"datasets": []}, "at least one source"),
        ({"datasets": [{"json_path": "gone.json"}]}, "gone.json must exist"),
        ({"datasets": [{"json_path": "a.json", "sampling_strategy": "first:0"}]}, "must hold samples"),
        ({"records": []}, "must hold a list"),
    ],
)
def test_unusable_mixtures_are_refused(files: Path, content: Any, words: str) -> None:
    path = files / "mixture.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=words):
        open_records(path)


def test_the_data_set_reads_a_mixture(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    """Samples equal those of the plain file, although their media lie in another folder."""
    plain = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    shutil.copy(tiny_demo.train_path, tmp_path / "train.jsonl")
    root = str(tiny_demo.media_root)
    entry = {"json_path": "train.jsonl", "sampling_strategy": "random:8", "media_root": root}
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps({"datasets": [entry]}))
    mixture = from_pretrained_dir(tiny_demo.model_dir, path, media_root=tmp_path, seed=3)
    other = from_pretrained_dir(tiny_demo.model_dir, path, media_root=tmp_path, seed=4)
    assert {mixture.sample_id(i) for i in range(8)} != {other.sample_id(i) for i in range(8)}
    by_id = {plain.sample_id(i): i for i in range(len(plain))}
    assert len(mixture) == 8
    for index in range(8):
        assert mixture.shape(index) == plain.shape(by_id[mixture.sample_id(index)])


@pytest.mark.parametrize(
    "text", ["[" * 5000, "2020-01-01: 2", "datasets:\n- {json_path: a.json, weight: 1.0e+12}"]
)
def test_hostile_yaml_is_refused(files: Path, text: str) -> None:
    (files / "mix.yaml").write_text(text)
    with pytest.raises(DataError, match=r"mix\.yaml"):
        open_records(files / "mix.yaml")


def test_a_name_that_is_too_long_is_named(files: Path) -> None:
    with pytest.raises(DataError, match=r"must exist, found .*too long"):
        open_records(files / ("x" * 300 + ".json"))
