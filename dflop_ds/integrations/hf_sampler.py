"""The batch sampler through which the callback acts: one rank's share of every planned step."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from dflop_ds.scheduling.rank_planner import RankPlanner


class BalancedBatchSampler(Sampler[list[int]]):
    """Microbatches of one rank, in the order of its accumulation steps.

    Already the share of one rank: it must not be sharded again.

    Parameters
    ----------
    planner : RankPlanner
    rank : int

    Attributes
    ----------
    epoch : int
        Set by :meth:`set_epoch`.
    num_skipped : int
        Steps at the start of the epoch that a resumed run skips: their batches are empty and not planned.
    batch_size, num_processes, drop_last
        What accelerate derives the total batch size from.
    """

    def __init__(self, planner: RankPlanner, rank: int) -> None:
        self.planner = planner
        self.rank = rank
        self.epoch = 0
        self.num_skipped = 0
        self.batch_size = planner.layout.batch_size
        self.num_processes = planner.layout.num_ranks
        self.drop_last = planner.layout.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches that an iteration yields, the same on every rank."""
        return self.planner.layout.batches_per_rank

    def __iter__(self) -> Iterator[list[int]]:
        layout = self.planner.layout
        first, num_skipped = self.epoch * layout.steps_per_epoch, self.num_skipped
        for index in range(layout.steps_per_epoch):
            if index < num_skipped:
                yield from [[] for _ in range(layout.slots(index))]
                continue
            planned = self.planner.plan(first + index)
            for members in planned.plan.replica_bins(self.rank):
                yield list(members) or [planned.filler]
