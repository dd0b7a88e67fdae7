"""One optimizer step of data-parallel ranks without a pipeline: its predicted time and the data-blind bins.

A bin is one (rank, slot) pair at index ``rank * num_slots + slot``; the microbatches of a slot run at the
same time on all ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.problem import FloatArray, IntArray

Bins = tuple[tuple[int, ...], ...]

SYNC_POINTS = ("step", "microbatch", "phase")
"""Where ranks wait for each other.

``step``: once per optimizer step (DDP, ZeRO 0 and 1). ``microbatch``: gradients are reduced after each one
(ZeRO 2). ``phase``: parameters are gathered layer by layer (ZeRO 3): a rank in its LLM waits for one that
is still in its encoder.
"""


_BISECTIONS = 40


@dataclasses.dataclass(frozen=True, eq=False)
class RankStep:
    """The samples of one global batch and the ranks that share them.

    Attributes
    ----------
    llm_tokens : ndarray of float64, shape (num_samples,)
    encoder_inputs : ndarray of float64, shape (num_samples,)
        Tiles plus frames.
    num_ranks : int
        Data-parallel ranks.
    num_slots : int
        Microbatches that each rank runs in the step (gradient accumulation).
    padded : bool
        Whether the collator pads to the longest sample; otherwise it packs.
    sync : str
        One of :data:`SYNC_POINTS`.
    max_tokens, max_encoder_inputs : int or None
        Hard limits of one bin; tokens count padding.

    Raises
    ------
    SchedulingError
        If there is no sample, rank or slot, or `sync` is unknown.
    """

    llm_tokens: FloatArray
    encoder_inputs: FloatArray
    num_ranks: int
    num_slots: int
    padded: bool
    sync: str
    max_tokens: int | None = None
    max_encoder_inputs: int | None = None

    def __post_init__(self) -> None:
        if min(len(self.llm_tokens), self.num_ranks, self.num_slots) < 1 or self.sync not in SYNC_POINTS:
            raise SchedulingError(
                f"a step must have samples, ranks, slots and a sync point of {SYNC_POINTS}, found "
                f"{len(self.llm_tokens)}, {self.num_ranks}, {self.num_slots} and {self.sync!r}. Correct the "
                "step."
            )
        for name in ("llm_tokens", "encoder_inputs"):
            column = np.asarray(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, column)
            if column.shape != (len(self.llm_tokens),) or not (np.isfinite(column) & (column >= 0)).all():
                raise SchedulingError(
                    f"{name} must hold one finite, non-negative number per sample, found shape "
                    f"{column.shape}. Correct the shapes of the samples."
                )

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return len(self.llm_tokens)

    @property
    def num_bins(self) -> int:
        """Bins: ranks times slots."""
        return self.num_ranks * self.num_slots

    def sizes(self, bins: Sequence[Sequence[int]]) -> MicrobatchSizes:
        """Sizes of bins, shape (num_bins,)."""
        return MicrobatchSizes.from_bins(self.llm_tokens, self.encoder_inputs, bins, padded=self.padded)

    def keeps_limits(self, sizes: MicrobatchSizes) -> bool:
        """Whether no bin exceeds a hard limit."""
        tokens, inputs = float(sizes.tokens.max()), float(sizes.encoder_inputs.max())
        return (self.max_tokens is None or tokens <= self.max_tokens) and (
            self.max_encoder_inputs is None or inputs <= self.max_encoder_inputs
        )

    def predict_s(self, bins: Sequence[Sequence[int]], cost: MicrobatchCost) -> float:
        """Predicted seconds of the step."""
        return step_time_s(self.by_rank(cost.phases_s(self.sizes(bins))), self.sync)

    def by_rank(self, phases_s: FloatArray) -> FloatArray:
        """Values of bins, shape (num_bins, k), as (num_ranks, num_slots, k)."""
        return phases_s.reshape(self.num_ranks, self.num_slots, -1)


def step_time_s(phases_s: FloatArray, sync: str) -> float:
    """Seconds of a step in which ranks wait for the slowest at every sync point.

    Parameters
    ----------
    phases_s : ndarray, shape (num_ranks, num_slots, num_phases)
    sync : str
        One of :data:`SYNC_POINTS`.
    """
    if sync == "step":
        return float(phases_s.sum(axis=(1, 2)).max())
    if sync == "microbatch":
        return float(phases_s.sum(axis=2).max(axis=0).sum())
    return float(phases_s.max(axis=0).sum())


def blind_bins(step: RankStep) -> Bins:
    """Bins by position: chunks of equal size, slot by slot, one rank after another.

    That is what a batch sampler sharded over ranks does with a full global batch. A last, smaller one is
    spread as evenly as it goes; with fewer samples than bins, the last bins are empty.
    """
    chunks = np.array_split(np.arange(step.num_samples), step.num_bins)
    bins: list[tuple[int, ...]] = [()] * step.num_bins
    for index, chunk in enumerate(chunks):
        slot, rank = divmod(index, step.num_ranks)
        bins[rank * step.num_slots + slot] = tuple(chunk.tolist())
    return tuple(bins)


def place_bins(step: RankStep, groups: Sequence[Sequence[int]], total_s: FloatArray) -> Bins:
    """Give groups of samples to ranks and slots so that ranks wait least.

    Parameters
    ----------
    step : RankStep
    groups : sequence of sequences of int, length num_bins
    total_s : ndarray, shape (num_bins,)
        Seconds of each group.
    """
    order = np.argsort(-total_s, kind="stable")
    places = np.empty(step.num_bins, dtype=np.int64)
    if step.sync == "step":
        loads_s, counts = np.zeros(step.num_ranks), np.zeros(step.num_ranks, dtype=np.int64)
        for group in order.tolist():
            rank = int(np.where(counts < step.num_slots, loads_s, np.inf).argmin())
            places[group] = rank * step.num_slots + counts[rank]
            loads_s[rank] += total_s[group]
            counts[rank] += 1
    else:
        slots, ranks = np.divmod(np.arange(step.num_bins), step.num_ranks)
        places[order] = ranks * step.num_slots + slots
    bins: list[tuple[int, ...]] = [()] * step.num_bins
    for members, place in zip(groups, places.tolist(), strict=True):
        bins[place] = tuple(sorted(int(sample) for sample in members))
    return tuple(bins)


def contiguous_groups(step: RankStep, cost: MicrobatchCost) -> list[IntArray] | None:
    """Cut the samples, longest first, into `num_bins` runs whose largest cost is least.

    Neighbours in length waste least padding. The limit on the cost of a run is found by bisection; runs that
    are left over are made by halving the costliest. None if no such runs keep the hard limits.
    """
    order = np.lexsort((-step.encoder_inputs, -step.llm_tokens))
    tokens, inputs = step.llm_tokens[order], step.encoder_inputs[order]
    high = float(cost.phases_s(step.sizes([order.tolist()])).sum())
    low, edges = 0.0, _cut(step, cost, tokens, inputs, high)
    if edges is None:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = _cut(step, cost, tokens, inputs, middle)
        if found is None:
            low = middle
        else:
            high, edges = middle, found
    groups = [order[a:b] for a, b in itertools.pairwise(edges)]
    while len(groups) < step.num_bins:
        splittable_s = [
            float(cost.phases_s(step.sizes([group.tolist()])).sum()) if len(group) > 1 else -1.0
            for group in groups
        ]
        index = int(np.argmax(splittable_s))
        half = len(groups[index]) // 2
        groups[index : index + 1] = [groups[index][:half], groups[index][half:]]
    return groups


def _cut(
    step: RankStep, cost: MicrobatchCost, tokens: FloatArray, inputs: FloatArray, limit_s: float
) -> list[int] | None:
    """Edges of the longest runs within all limits, or None if `num_bins` of them do not suffice."""
    summed, squares = np.cumsum(tokens), np.cumsum(tokens**2)
    summed_inputs = np.cumsum(inputs)
    edges = [0]
    while edges[-1] < len(tokens):
        if len(edges) > step.num_bins:
            return None
        start = edges[-1]
        if step.padded:
            counts = np.arange(1, len(tokens) - start + 1)
            run_tokens, run_squares = counts * tokens[start], counts * tokens[start] ** 2
        else:
            run_tokens = summed[start:] - (summed[start - 1] if start else 0.0)
            run_squares = squares[start:] - (squares[start - 1] if start else 0.0)
        run_inputs = summed_inputs[start:] - (summed_inputs[start - 1] if start else 0.0)
        run_s = cost.phases_s(MicrobatchSizes(run_tokens, run_squares, run_inputs)).sum(axis=-1)
        length = int(np.searchsorted(run_s, limit_s, side="right"))
        for column, cap in ((run_tokens, step.max_tokens), (run_inputs, step.max_encoder_inputs)):
            if cap is not None:
                length = min(length, int(np.searchsorted(column, cap, side="right")))
        if length == 0:
            return None
        edges.append(start + length)
    return edges
