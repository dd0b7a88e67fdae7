"""One optimizer step of data-parallel ranks without a pipeline: its predicted time and the data-blind bins.

A bin is one (rank, slot) pair at index ``rank * num_slots + slot``; the microbatches of a slot run at the
same time on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.problem import FloatArray

Bins = tuple[tuple[int, ...], ...]
BoolArray = npt.NDArray[np.bool_]

SYNC_POINTS = ("step", "microbatch", "phase")
"""Where ranks wait for each other.

``step``: once per optimizer step (DDP, ZeRO 0 and 1). ``microbatch``: gradients are reduced after each one
(ZeRO 2). ``phase``: parameters are gathered layer by layer (ZeRO 3): a rank in its LLM waits for one that
is still in its encoder.
"""


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

    def allows(self, sizes: MicrobatchSizes) -> BoolArray:
        """Which sizes keep the hard limits, in their shape."""
        allowed = np.ones(np.shape(sizes.tokens), dtype=np.bool_)
        if self.max_tokens is not None:
            allowed &= sizes.tokens <= self.max_tokens
        if self.max_encoder_inputs is not None:
            allowed &= sizes.encoder_inputs <= self.max_encoder_inputs
        return allowed

    def keeps_limits(self, sizes: MicrobatchSizes) -> bool:
        """Whether no bin exceeds a hard limit."""
        return bool(self.allows(sizes).all())

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
