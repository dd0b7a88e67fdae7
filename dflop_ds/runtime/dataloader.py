"""The data loader: microbatches of this replica, in the order of the plan."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.utils.data import DataLoader, Dataset

from dflop_ds.data.layout import bin_tag
from dflop_ds.errors import DataError, PlanError
from dflop_ds.runtime.feed import PlanFeed
from dflop_ds.runtime.stop import leave_signals_to_rank

logger = logging.getLogger(__name__)

Microbatch = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]

_MAX_PREFETCH = 4


class DflopDataLoader(DeepSpeedDataLoader):
    """Loads the samples that the plan gives to this rank, and no others.

    Each item is ``((media values, layout), (targets, weights, tag))`` as ``PackedCollator`` makes it,
    with the weights scaled so that DeepSpeed's mean over bins is the mean over the global batch.

    Parameters
    ----------
    dataset : Dataset
        Already without media where this rank needs labels only.
    feed : PlanFeed
    collate_fn : callable
    num_microbatches : int
        Microbatches of a full step.
    num_planned : int
        Microbatches that are planned ahead at least: workers load no further.
    num_workers : int
        Fewer are started where less is planned ahead.
    pin_memory : bool
    steps_per_epoch : int
    tput_timer : object
        DeepSpeed's throughput timer.
    local_rank : int
    """

    data: Any
    dataloader: Any

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        feed: PlanFeed,
        collate_fn: Callable[[list[Any]], Microbatch],
        num_microbatches: int,
        num_planned: int,
        num_workers: int,
        pin_memory: bool,
        steps_per_epoch: int,
        tput_timer: Any,
        local_rank: int,
    ) -> None:
        num_workers, self._prefetch = loading_ahead(num_workers, num_planned)
        super().__init__(
            dataset,
            batch_size=1,
            pin_memory=pin_memory,
            local_rank=local_rank,
            tput_timer=tput_timer,
            collate_fn=collate_fn,
            num_local_io_workers=num_workers,
            data_sampler=range(steps_per_epoch * num_microbatches),
        )
        self.feed = feed
        self.current_tag: int | None = None
        self._expected: collections.deque[tuple[int, float]] = collections.deque()

    def expect(self, bins: tuple[tuple[int, ...], ...], loss_scale: float) -> None:
        """Announce the bins of the step that is about to run, and the factor of its losses."""
        self._expected.extend((bin_tag(members), loss_scale) for members in bins)

    def close(self) -> None:
        """End the data workers; harmless when called again."""
        self.restart()
        self.dataloader = None

    def restart(self) -> None:
        """Forget what is loaded; the next microbatch is drawn from the feed as it is then."""
        iterator, self.data = self.data, None
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        self._expected.clear()

    def __next__(self) -> Microbatch:
        # Not before the first microbatch is wanted: a resumed run loads nothing that it will skip.
        if self.data is None and self.dataloader is not None:
            self.data = iter(self.dataloader)
        try:
            inputs, (targets, weights, tag) = super().__next__()
        except DataError as error:
            # A worker's error carries its whole traceback; its last line is the message.
            raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None
        if not self._expected:
            raise PlanError(
                "more microbatches were loaded than the step has; call engine.train_batch() to train."
            )
        expected, loss_scale = self._expected.popleft()
        self.current_tag = int(tag.item())
        if self.current_tag != expected:
            raise PlanError(
                f"the samples of a microbatch must have tag {expected} as planned, found {self.current_tag}; "
                "the data set must return sample i for index i on every rank."
            )
        return inputs, (targets, weights * loss_scale, tag)

    def _create_dataloader(self) -> DataLoader[Any]:
        workers = self.num_local_io_workers
        self.dataloader = DataLoader(
            self.dataset,
            batch_sampler=_Drawn(self.feed),
            collate_fn=self.collate_fn,
            num_workers=workers,
            prefetch_factor=self._prefetch if workers else None,
            pin_memory=self.pin_memory,
            worker_init_fn=leave_signals_to_rank,
            # The global generator must not depend on how often loading was begun.
            generator=torch.Generator().manual_seed(0),
        )
        return self.dataloader


class _Drawn:
    """The feed's bins as a batch sampler."""

    def __init__(self, feed: PlanFeed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[list[Any]]:
        return self.feed.bins()


def loading_ahead(num_workers: int, num_planned: int) -> tuple[int, int]:
    """Workers, and batches that each may load ahead, such that none runs ahead of the plans.

    Parameters
    ----------
    num_workers : int
        As configured.
    num_planned : int
        Microbatches beyond the running step that are always planned.
    """
    usable = min(num_workers, num_planned)
    if usable < num_workers:
        logger.info(
            "%d instead of %d data workers, as only %d microbatches are planned ahead",
            usable,
            num_workers,
            num_planned,
        )
    return usable, min(_MAX_PREFETCH, num_planned // usable) if usable else 0
