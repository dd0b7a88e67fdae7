"""Streams: numbers over passes, what is kept, and positions to go on from."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.probe import Limits
from dflop_ds.data.stream import ShapeReader, StreamDataset, StreamRecords
from dflop_ds.errors import DataError

datasets = pytest.importorskip("datasets")


class Plain:
    """Five records a pass, named by pass and place; it knows nothing of positions."""

    def __init__(self, size: int = 5) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place in range(self.size):
            yield {"id": f"{self.epoch}-{place}", "conversations": []}


def hub(size: int = 5) -> Any:
    """The same with ``datasets``: names do not tell the pass, as every pass holds the same records."""
    rows = [{"id": str(place), "conversations": [{"from": "human", "value": "?"}]} for place in range(size)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)


def names(records: StreamRecords, numbers: Any) -> list[str]:
    return [records.record(number)["id"] for number in numbers]


def test_numbers_go_on_over_passes() -> None:
    records = StreamRecords(Plain())
    assert names(records, range(12)) == [f"{n // 5}-{n % 5}" for n in range(12)]
    assert records.pass_number == 2


def test_a_pass_ends_before_the_next_is_read() -> None:
    records = StreamRecords(Plain(2))
    first, second, end = (records.read_next(0) for _ in range(3))
    assert (first and first[0], second and second[1]["id"], end) == (0, "0-1", None)
    assert records.pass_number == 1
    assert records.read_next(0) is None
    found = [records.read_next(1) for _ in range(3)]
    assert [one and one[0] for one in found] == [2, 3, None]


@pytest.mark.parametrize("make", [Plain, hub])
@pytest.mark.parametrize("num_read", [0, 3, 5, 7, 10])
def test_a_position_is_json_and_goes_on_exactly(make: Any, num_read: int) -> None:
    whole = StreamRecords(make())
    expected = names(whole, range(14))
    first = StreamRecords(make())
    for _ in range(num_read + num_read // 5):  # at 5 and 10 the end of the pass has been noticed
        first.read_next(first.pass_number)
    state = json.loads(json.dumps(first.state()))
    assert state["number"] == num_read
    for other in (StreamRecords(make()), first):
        other.restore(state)
        assert other.state() == state, "also before the first record is read"
        assert names(other, range(num_read, 14)) == expected[num_read:]
        other.restore(state)
        assert names(other, range(num_read, 14)) == expected[num_read:]


def test_a_shorter_stream_is_refused() -> None:
    records = StreamRecords(Plain())
    records.record(3)
    with pytest.raises(DataError, match="must hold the 4 records"):
        StreamRecords(Plain(2)).restore(records.state())
    with pytest.raises(DataError, match="must hold records in every pass, found none in pass 1"):
        StreamRecords(Plain(0)).record(0)
    with pytest.raises(DataError, match=r"found none in pass 2.*a generator can be read once only"):
        StreamRecords({"id": str(n)} for n in range(3)).record(3)
    with pytest.raises(DataError, match="conversations"):
        StreamRecords(datasets.Dataset.from_list([{"text": "a"}]).to_iterable_dataset())


def test_only_what_will_be_trained_is_kept() -> None:
    records = StreamRecords(Plain(100))
    records.record(3)
    records.planned(0, own=[2, 6], others=[1, 5])
    assert [(records.read_next(0) or (-1,))[0] for _ in range(3)] == [4, 5, 6], "whoever plans sees them all"
    records.record(7)
    assert sorted(records._kept) == [0, 2, 3, 4, 6, 7], "1 and 5 belong to another replica"
    assert records.draw(6) == (6, {"id": "0-6", "conversations": []})
    # A plan of the next window: what is left of the first one was dropped and will never be planned.
    records.planned(1, own=[8], others=[9])
    assert sorted(records._kept) == [2, 7]
    records.draw(2)
    records.draw(8)
    records.record(10)
    assert sorted(records._kept) == [7, 10]
    with pytest.raises(DataError, match="found it forgotten"):
        records.draw(2)


def test_workers_get_records_and_shapes_follow_policy(tiny_demo: DemoPaths) -> None:
    good = [json.loads(line) for line in tiny_demo.train_path.read_text().splitlines()[:4]]
    bad = {"id": "bad", "conversations": "none"}
    settings = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, media_root=tiny_demo.media_root)
    records = StreamRecords(iter_twice := [*good[:2], bad, *good[2:]])
    reader = ShapeReader(records, settings, Limits(10**6, broken="drop"))
    found = [reader.next_shape(0) for _ in range(6)]
    assert found[2] == (2, None)
    assert found[5] is None
    assert [entry[1] for entry in found[:2] if entry] == [settings.shape(0), settings.shape(1)]
    with pytest.raises(DataError, match="'bad'"):
        ShapeReader(StreamRecords([bad]), settings, Limits(10**6)).next_shape(0)
    dataset = StreamDataset(settings, reader and _table(settings), records, reader)
    loader = DataLoader(dataset, batch_sampler=[[(7, iter_twice[3])]], collate_fn=list, num_workers=1)
    ((sample,),) = list(loader)
    assert (sample.index, sample.sample_id) == (7, settings.sample_id(2))
    assert pickle.loads(pickle.dumps(dataset)).records is None


def _table(settings: Any) -> Any:
    from dflop_ds.shapes import ShapeTable

    return ShapeTable.from_shapes([settings.shape(0)])
