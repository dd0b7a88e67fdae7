"""From the position in training to the bins of that step, for data-parallel ranks without a pipeline."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.errors import PlanError, SchedulingError
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.problem import IntArray
from dflop_ds.scheduling.rank_bins import RankPlan, plan_rank_bins
from dflop_ds.scheduling.rank_step import RankStep
from dflop_ds.shapes import ShapeTable

TIMELINE_SCHEMA_VERSION = 1

_PLANS_KEPT = 64


@dataclasses.dataclass(frozen=True)
class RankLayout:
    """How an epoch is cut into optimizer steps.

    Attributes
    ----------
    num_samples : int
        Samples of the data set.
    batch_size : int
        Mean samples per microbatch.
    num_ranks, num_slots : int
        Data-parallel ranks, and microbatches per rank and full optimizer step.
    drop_last : bool
        Leave out the samples that do not fill a microbatch on every rank.

    Raises
    ------
    SchedulingError
        If an epoch would hold no batch.
    """

    num_samples: int
    batch_size: int
    num_ranks: int
    num_slots: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.batches_per_rank < 1:
            raise SchedulingError(
                f"an epoch must hold at least one batch, found {self.num_samples} samples for "
                f"{self.num_ranks} ranks of {self.batch_size}. Add data, or use smaller batches."
            )

    @property
    def batches_per_rank(self) -> int:
        """Microbatches that each rank runs in an epoch."""
        per_slot = self.batch_size * self.num_ranks
        return self.num_samples // per_slot if self.drop_last else math.ceil(self.num_samples / per_slot)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may have fewer microbatches."""
        return math.ceil(self.batches_per_rank / self.num_slots)

    def slots(self, index: int) -> int:
        """Microbatches per rank of step `index` of an epoch."""
        return min(self.num_slots, self.batches_per_rank - index * self.num_slots)

    def batch(self, order: IntArray, index: int) -> IntArray:
        """Samples of step `index`, from the order of the whole epoch."""
        size = self.num_slots * self.num_ranks * self.batch_size
        usable = self.batches_per_rank * self.num_ranks * self.batch_size
        return order[: min(usable, len(order))][index * size : (index + 1) * size]


class CostTimeline:
    """Which costs apply from which step on: plans depend on the step alone, also after a resume."""

    def __init__(self, entries: list[tuple[int, MicrobatchCost]] | None = None) -> None:
        self._entries = sorted(entries or [], key=lambda entry: entry[0])

    def at(self, position: int) -> MicrobatchCost | None:
        """Costs at a step; None before the first entry."""
        known = [cost for first, cost in self._entries if first <= position]
        return known[-1] if known else None

    @property
    def newest(self) -> MicrobatchCost | None:
        """Costs of the last entry."""
        return self._entries[-1][1] if self._entries else None

    def add(self, first_position: int, cost: MicrobatchCost) -> None:
        """Let costs apply from a step on that no rank has planned yet."""
        self._entries.append((first_position, cost))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        entries = [{"first_position": first, "cost": cost.to_dict()} for first, cost in self._entries]
        return {"schema_version": TIMELINE_SCHEMA_VERSION, "entries": entries}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostTimeline:
        """Timeline written by :meth:`to_dict`.

        Raises
        ------
        PlanError
            If the content is of another schema.
        """
        if content.get("schema_version") != TIMELINE_SCHEMA_VERSION:
            raise PlanError(
                f"a stored cost timeline must have schema_version {TIMELINE_SCHEMA_VERSION}, found "
                f"{content.get('schema_version')!r}. Resume with the version of dflop_ds that wrote it."
            )
        entries = content["entries"]
        return cls(
            [(int(entry["first_position"]), MicrobatchCost.from_dict(entry["cost"])) for entry in entries]
        )


@dataclasses.dataclass(frozen=True)
class PlannedBins:
    """A planned optimizer step.

    Attributes
    ----------
    plan : StepPlan
        Data set indices of every bin; ``num_terms`` counts samples.
    step : RankStep
    found : RankPlan
        Positions in the global batch, in the order of the bins of `plan`.
    filler : int
        Data set index of the shortest sample: what a rank without samples loads, with weight zero.
    """

    plan: StepPlan
    step: RankStep
    found: RankPlan
    filler: int

    @property
    def checksum(self) -> int:
        """Equal on all ranks if and only if they made the same plan."""
        return int(self.plan.encode()[0])

    @property
    def useful_tokens(self) -> int:
        """LLM tokens of the samples, without padding."""
        return int(self.step.llm_tokens.sum())


class RankPlanner:
    """Plans of any step: a pure function of shapes, order, settings and costs.

    Parameters
    ----------
    table : ShapeTable
        Shapes of the data set.
    layout : RankLayout
    order : callable of int to ndarray of int64
        Order of the samples in an epoch.
    padded, sync, max_tokens, max_encoder_inputs
        See :class:`~dflop_ds.scheduling.rank_step.RankStep`.
    policy : {"lpt", "cp_sat", "blind"}
    timeline : CostTimeline
    """

    def __init__(
        self,
        table: ShapeTable,
        layout: RankLayout,
        order: Callable[[int], IntArray],
        *,
        padded: bool,
        sync: str,
        policy: str = "lpt",
        timeline: CostTimeline | None = None,
        max_tokens: int | None = None,
        max_encoder_inputs: int | None = None,
    ) -> None:
        if len(table) != layout.num_samples:
            raise SchedulingError(
                f"shapes must describe the {layout.num_samples} samples of the data set, found {len(table)}. "
                "Use the shapes of this data set."
            )
        self.layout, self.padded, self.sync, self.policy = layout, padded, sync, policy
        self.timeline = CostTimeline() if timeline is None else timeline
        self.next_unplanned = 0
        self._table, self._order_of = table, order
        self._limits = {"max_tokens": max_tokens, "max_encoder_inputs": max_encoder_inputs}
        self._orders: dict[int, IntArray] = {}
        self._plans: OrderedDict[int, PlannedBins] = OrderedDict()

    def plan(self, position: int) -> PlannedBins:
        """Plan of the optimizer step at a position: epoch x steps per epoch + step of the epoch."""
        if position not in self._plans:
            self._plans[position] = self._make(position)
            self.next_unplanned = max(self.next_unplanned, position + 1)
            while len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        return self._plans[position]

    def media_candidates(self, *, with_frames: bool, limit: int) -> list[int]:
        """Data set indices of the shortest samples that are known to have media: clips, or anything else."""
        has_frames = self._table.num_frames > 0
        rows = np.flatnonzero((self._table.encoder_inputs > 0) & (has_frames == with_frames))
        return self.shortest_first(rows)[:limit]

    def shortest_first(self, rows: Sequence[int] | IntArray) -> list[int]:
        """Data set indices by the length of the samples."""
        return sorted((int(row) for row in rows), key=lambda row: int(self._table.llm_tokens[row]))

    def _make(self, position: int) -> PlannedBins:
        epoch, index = divmod(position, self.layout.steps_per_epoch)
        rows = self.layout.batch(self._order(epoch), index)
        num_slots = self.layout.slots(index)
        step = RankStep(
            self._table.llm_tokens[rows].astype(np.float64),
            self._table.encoder_inputs[rows].astype(np.float64),
            self.layout.num_ranks,
            num_slots,
            self.padded,
            self.sync,
            **self._limits,
        )
        found = plan_rank_bins(step, self.timeline.at(position), policy=self.policy)
        bins = tuple(tuple(int(rows[i]) for i in members) for members in found.bins)
        plan = StepPlan(position, epoch, self.layout.num_ranks, num_slots, bins, len(rows))
        return PlannedBins(plan, step, found, int(rows[int(step.llm_tokens.argmin())]))

    def _order(self, epoch: int) -> IntArray:
        if epoch not in self._orders:
            order = np.asarray(self._order_of(epoch), dtype=np.int64)
            if not np.array_equal(np.sort(order), np.arange(self.layout.num_samples)):
                raise SchedulingError(
                    f"the order of an epoch must name each of the {self.layout.num_samples} samples once, "
                    f"found {len(order)} entries. Use a sampler without replacement over the whole data set."
                )
            self._orders = {epoch: order}
        return self._orders[epoch]
