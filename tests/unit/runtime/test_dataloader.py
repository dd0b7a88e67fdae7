"""Loading what the plan gives, in its order, and never more than is planned."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from dflop_ds.data.layout import bin_tag
from dflop_ds.errors import PlanError
from dflop_ds.runtime.dataloader import DflopDataLoader, loading_ahead

Bins = tuple[tuple[int, ...], ...]


class _Numbers(Dataset):
    """Sample ``i`` is ``i``, or ``i + 1`` where it lies."""

    def __init__(self, lies: tuple[int, ...] = ()) -> None:
        self.lies = lies

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        return index + 1 if index in self.lies else index


def collate(samples: list[int]) -> Any:
    """Indices as inputs; target and weight of every sample are its index."""
    values = torch.tensor(samples, dtype=torch.int64)
    return (values.float(), values), (values, values.float(), torch.tensor([bin_tag(samples)]))


class _Feed:
    """Plans ``lookahead + 1`` steps at once and one more per step, as ``PlanFeed`` does."""

    def __init__(self, steps: Iterator[Bins], lookahead: int) -> None:
        self.lookahead = lookahead
        self._steps = steps
        self._plans: collections.deque[Bins] = collections.deque()
        self._queue: collections.deque[tuple[int, ...]] = collections.deque()
        self.num_planned = self.num_drawn = 0
        for _ in range(lookahead + 1):
            self._receive()

    def _receive(self) -> None:
        bins = next(self._steps)
        self._plans.append(bins)
        self._queue.extend(bins)
        self.num_planned += len(bins)

    def next_step(self) -> Bins:
        bins = self._plans.popleft()
        self._receive()
        return bins

    def bins(self) -> Iterator[list[int]]:
        while True:
            if not self._queue:
                raise PlanError(f"drawn beyond the {self.num_planned} bins that are planned")
            self.num_drawn += 1
            yield list(self._queue.popleft())


class _Timer:
    num_starts = 0

    def start(self) -> None:
        self.num_starts += 1


def _steps(num_microbatches: int | list[int], samples_per_bin: int = 2) -> Iterator[Bins]:
    """Endless steps of bins that hold consecutive numbers."""
    counts = [num_microbatches] if isinstance(num_microbatches, int) else num_microbatches
    number = itertools.count()
    for count in itertools.cycle(counts):
        yield tuple(tuple(next(number) for _ in range(samples_per_bin)) for _ in range(count))


def _loader(feed: _Feed, *, num_microbatches: int, num_workers: int = 0, **options: Any) -> DflopDataLoader:
    arguments: dict[str, Any] = {
        "dataset": _Numbers(),
        "feed": feed,
        "num_planned": feed.lookahead * num_microbatches,
        "collate_fn": collate,
        "num_microbatches": num_microbatches,
        "num_workers": num_workers,
        "pin_memory": False,
        "steps_per_epoch": 5,
        "tput_timer": None,
        "local_rank": 0,
    }
    return DflopDataLoader(**(arguments | options))


def _run_step(feed: _Feed, loader: DflopDataLoader, iterator: Iterator[Any], scale: float = 1.0) -> list[Any]:
    bins = feed.next_step()
    loader.expect(bins, scale)
    return [next(iterator) for _ in bins]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bins_come_in_the_order_of_the_plan_with_scaled_weights(num_workers: int) -> None:
    steps: list[Bins] = [((7, 3), (1,)), ((), (4, 2, 9)), ((5,), (8,)), ((6,), (0,)), ((11,), (12,))]
    feed = _Feed(iter(steps), lookahead=1)
    loader = _loader(feed, num_microbatches=2, num_workers=num_workers)
    iterator = iter(loader)
    for bins, scale in zip(steps[:3], (0.5, 3.0, 1.0), strict=True):
        for members, ((floats, ints), (targets, weights, tag)) in zip(
            bins, _run_step(feed, loader, iterator, scale), strict=True
        ):
            assert ints.tolist() == floats.tolist() == targets.tolist() == list(members)
            assert weights.tolist() == [member * scale for member in members]
            assert tag.tolist() == [bin_tag(members)]
            assert loader.current_tag is not None
    assert loader.current_tag == bin_tag((8,))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_samples_than_planned_are_refused(num_workers: int) -> None:
    feed = _Feed(_steps(2), lookahead=1)
    loader = _loader(feed, num_microbatches=2, num_workers=num_workers, dataset=_Numbers(lies=(3,)))
    loader.expect(feed.next_step(), 1.0)
    iterator = iter(loader)
    assert next(iterator)[1][0].tolist() == [0, 1]
    expected = f"tag {bin_tag([2, 3])} as planned, found {bin_tag([2, 4])}"
    with pytest.raises(PlanError, match=expected):
        next(iterator)


def test_another_order_of_the_right_samples_is_refused() -> None:
    feed = _Feed(_steps(1), lookahead=1)
    loader = _loader(feed, num_microbatches=1, collate_fn=lambda samples: collate(samples[::-1]))
    loader.expect(feed.next_step(), 1.0)
    with pytest.raises(PlanError, match="must have tag"):
        next(iter(loader))


def test_more_microbatches_than_announced_are_refused() -> None:
    feed = _Feed(_steps(2), lookahead=1)
    loader = _loader(feed, num_microbatches=2)
    iterator = iter(loader)
    _run_step(feed, loader, iterator)
    with pytest.raises(PlanError, match="more microbatches were loaded than the step has"):
        next(iterator)


def test_length_and_throughput_timer_are_those_of_deepspeed() -> None:
    timer = _Timer()
    feed = _Feed(_steps(3), lookahead=1)
    loader = _loader(feed, num_microbatches=3, tput_timer=timer)
    assert len(loader) == 5 * 3
    _run_step(feed, loader, iter(loader))
    assert timer.num_starts == 3


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize(("num_workers", "num_microbatches"), [(0, 3), (1, 1), (1, 3), (2, 4)])
def test_workers_never_draw_beyond_the_plan(lookahead: int, num_workers: int, num_microbatches: int) -> None:
    feed = _Feed(_steps(num_microbatches), lookahead)
    loader = _loader(feed, num_microbatches=num_microbatches, num_workers=num_workers)
    iterator = iter(loader)
    ahead = []
    for step in range(5):
        loaded = _run_step(feed, loader, iterator)
        assert [item[0][1].tolist() for item in loaded] == [
            [2 * n, 2 * n + 1] for n in range(step * num_microbatches, (step + 1) * num_microbatches)
        ]
        ahead.append(feed.num_drawn - (step + 1) * num_microbatches)
    if num_workers:
        assert all(1 <= count <= lookahead * num_microbatches for count in ahead), "loads ahead, not too far"
    else:
        assert ahead == [0] * 5


@pytest.mark.parametrize("counts", [[4, 1, 4, 4], [3, 4, 4], [4, 7]], ids=str)
def test_steps_of_other_sizes_are_not_overdrawn(counts: list[int]) -> None:
    """Ragged tails and steps that needed more microbatches."""
    feed = _Feed(_steps(counts), lookahead=1)
    loader = _loader(feed, num_microbatches=4, num_workers=1)
    iterator = iter(loader)
    loaded = [item for _ in range(6) for item in _run_step(feed, loader, iterator)]
    assert [item[0][1][0].item() for item in loaded] == [2 * n for n in range(len(loaded))]


@pytest.mark.parametrize(("counts", "num_workers", "lookahead"), [([1], 2, 1), ([4, 1], 2, 2)])
def test_an_epoch_of_short_steps_is_not_overdrawn(
    counts: list[int], num_workers: int, lookahead: int
) -> None:
    """A data set smaller than a global batch, and one of a full and a short step."""
    feed = _Feed(_steps(counts), lookahead=lookahead)
    cycle = counts * (lookahead + 1)
    fewest = min(sum(cycle[i : i + lookahead]) for i in range(len(counts)))
    loader = _loader(feed, num_microbatches=4, num_workers=num_workers, num_planned=fewest)
    iterator = iter(loader)
    loaded = [item for _ in range(6) for item in _run_step(feed, loader, iterator)]
    assert [item[0][1][0].item() for item in loaded] == [2 * n for n in range(len(loaded))]


@pytest.mark.parametrize(
    ("num_workers", "num_planned", "expected"),
    [
        (0, 1, (0, 0)),
        (1, 1, (1, 1)),
        (1, 3, (1, 3)),
        (1, 100, (1, 4)),
        (2, 4, (2, 2)),
        (3, 4, (3, 1)),
        (4, 4, (4, 1)),
        (5, 4, (4, 1)),
        (2, 100, (2, 4)),
    ],
)
def test_workers_and_batches_ahead(num_workers: int, num_planned: int, expected: tuple[int, int]) -> None:
    workers, ahead = loading_ahead(num_workers, num_planned)
    assert (workers, ahead) == expected
    assert workers * ahead <= num_planned
