"""Moves and swaps of samples between the bins of a step whose costs need not add up (padding).

A step is as long as its slowest rank, which most exchanges do not touch. So the search lowers a smooth
stand-in, the p-norm of the loads at every sync point, for p = 2, 8, 32: small powers see padding anywhere,
large ones little but the slowest rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.scheduling.problem import FloatArray, IntArray
from dflop_ds.scheduling.rank_step import Bins, RankStep, step_time_s

_SQUARINGS = (1, 3, 5)
_MAX_PASSES, _EFFORT = 64, 2**14
"""Passes per power, and passes times samples: planning must take little of a step of many ranks."""

_RELATIVE_GAIN = 1e-9


def refine(step: RankStep, bins: Bins, cost: MicrobatchCost) -> Bins:
    """The shortest step found by exchanging samples between bins, with the given bins as a start.

    Each pass takes one bin, busiest first, and carries out the best of its exchanges with all others: one of
    its samples for one of theirs, or for nothing. Hard limits are never broken, no bin becomes empty.
    """
    state = _State(step, bins, cost)
    best_s, best = state.step_s(), bins
    if step.num_bins == 1 or best_s == 0.0:
        return bins
    for squarings in _SQUARINGS:
        for source in _passes(state):
            exchange = state.best_exchange(source, squarings)
            if exchange is None:
                continue
            state.apply(exchange)
            if state.step_s() < best_s:
                best_s, best = state.step_s(), state.snapshot()
    return tuple(tuple(sorted(members)) for members in best)


def _passes(state: _State) -> Iterator[int]:
    """Bins in sweeps, busiest first, until a sweep changes nothing or the effort is spent."""
    left, seen = min(_MAX_PASSES, max(1, _EFFORT // state.num_samples)), -1
    while seen != state.num_exchanges:
        seen = state.num_exchanges
        yield from state.busiest_first()[:left].tolist()
        left -= state.num_bins
        if left <= 0:
            return


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Samples `given` leaves `source` for `target`, which gives `taken` (or nothing, -1) in return."""

    source: int
    given: int
    target: int
    taken: int


class _State:
    """Bins, what they hold, and their seconds.

    A *load* is the time of one rank up to one sync point; loads have shape (num_ranks, num_points, k). Bin
    `b` is part of ``loads[rank[b], point[b]]``.
    """

    def __init__(self, step: RankStep, bins: Bins, cost: MicrobatchCost) -> None:
        self._step, self._cost = step, cost
        self._bins = [list(members) for members in bins]
        self.num_samples, self.num_bins, self.num_exchanges = step.num_samples, step.num_bins, 0
        self._rank, slot = np.divmod(np.arange(step.num_bins), step.num_slots)
        self._point = np.zeros_like(slot) if step.sync == "step" else slot
        self._bin_of = np.empty(step.num_samples, dtype=np.int64)
        self._longest_without = np.empty(step.num_samples)
        self._longest = np.empty(step.num_bins)
        self._sums = np.empty((step.num_bins, 4))
        self._sample_sums = np.stack(
            [np.ones(step.num_samples), step.llm_tokens, step.llm_tokens**2, step.encoder_inputs], axis=1
        )
        self._phases_s = np.empty((step.num_bins, 2))
        for index in range(step.num_bins):
            self._update(index)

    def step_s(self) -> float:
        """Predicted seconds of the step."""
        return step_time_s(self._step.by_rank(self._phases_s), self._step.sync)

    def snapshot(self) -> Bins:
        """The bins as they are."""
        return tuple(tuple(members) for members in self._bins)

    def busiest_first(self) -> IntArray:
        """Bins by the load that they are part of, then by their own time."""
        loads_s, own_s = self._loads_s(), self._phases_s.sum(axis=1)
        return np.lexsort((-own_s, -loads_s.sum(axis=-1)[self._rank, self._point]))

    def best_exchange(self, source: int, squarings: int) -> _Exchange | None:
        """The exchange of a bin that lowers the p-norm most, or None if none does."""
        mine = np.array(self._bins[source])
        others = np.flatnonzero(self._bin_of != source)
        targets = np.append(self._bin_of[others], np.delete(np.arange(self.num_bins), source))
        left, right = self._sizes_after(source, mine, others, targets)
        change = self._norm_change(source, targets, left, right, squarings)
        change[~(self._step.allows(left) & self._step.allows(right))] = np.inf
        if len(mine) == 1:
            change[:, len(others) :] = np.inf
        row, column = np.unravel_index(int(change.argmin()), change.shape)
        if change[row, column] > -_RELATIVE_GAIN:
            return None
        taken = int(others[column]) if column < len(others) else -1
        return _Exchange(source, int(mine[row]), int(targets[column]), taken)

    def apply(self, exchange: _Exchange) -> None:
        """Carry an exchange out."""
        source, target = self._bins[exchange.source], self._bins[exchange.target]
        source.remove(exchange.given)
        target.append(exchange.given)
        if exchange.taken >= 0:
            target.remove(exchange.taken)
            source.append(exchange.taken)
        self._update(exchange.source)
        self._update(exchange.target)
        self.num_exchanges += 1

    def _update(self, index: int) -> None:
        members = np.array(self._bins[index])
        tokens = self._step.llm_tokens[members]
        top = int(tokens.argmax())
        self._bin_of[members] = index
        self._longest[index] = self._longest_without[members] = tokens[top]
        self._longest_without[members[top]] = np.delete(tokens, top).max(initial=0.0)
        self._sums[index] = self._sample_sums[members].sum(axis=0)
        self._phases_s[index] = self._cost.phases_s(self._sizes(self._sums[index], self._longest[index]))

    def _sizes(self, sums: FloatArray, longest: FloatArray) -> MicrobatchSizes:
        """Sizes of bins from their sums, shape (..., 4), and their longest samples."""
        if not self._step.padded:
            return MicrobatchSizes(sums[..., 1], sums[..., 2], sums[..., 3])
        tokens = sums[..., 0] * longest
        return MicrobatchSizes(tokens, tokens * longest, sums[..., 3])

    def _sizes_after(
        self, source: int, mine: IntArray, others: IntArray, targets: IntArray
    ) -> tuple[MicrobatchSizes, MicrobatchSizes]:
        """Sizes of the source and of the target after each exchange, shape (len(mine), len(targets)).

        Row i gives the i-th sample of the source away. The first ``len(others)`` columns give another sample
        back, the last ones nothing.
        """
        nothing = len(targets) - len(others)
        given, taken = self._sample_sums[mine][:, None], np.zeros((len(targets), 4))
        taken[: len(others)] = self._sample_sums[others]
        longest_left = np.maximum(self._longest_without[mine][:, None], taken[:, 1])
        kept = np.append(self._longest_without[others], self._longest[targets[len(targets) - nothing :]])
        longest_right = np.maximum(kept, given[..., 1])
        left = self._sizes(self._sums[source] - given + taken, longest_left)
        return left, self._sizes(self._sums[targets] + given - taken, longest_right)

    def _loads_s(self) -> FloatArray:
        phases_s = self._step.by_rank(self._at_point(self._phases_s))
        return phases_s.sum(axis=1, keepdims=True) if self._step.sync == "step" else phases_s

    def _at_point(self, phases_s: FloatArray) -> FloatArray:
        """Encoder and LLM time are one unless ranks wait for each other in between."""
        return phases_s if self._step.sync == "phase" else phases_s.sum(axis=-1, keepdims=True)

    def _norm_change(
        self, source: int, targets: IntArray, left: MicrobatchSizes, right: MicrobatchSizes, squarings: int
    ) -> FloatArray:
        """Change of the sum over sync points of the p-norm of the ranks' loads; the largest load is 1."""
        loads_s, old_s = self._loads_s(), self._at_point(self._phases_s)
        unit_s = loads_s.max()
        loads, old = loads_s / unit_s, old_s / unit_s
        a, b = (self._rank[source], self._point[source]), (self._rank[targets], self._point[targets])
        gain_a = self._at_point(self._cost.phases_s(left)) / unit_s - old[source]
        gain_b = self._at_point(self._cost.phases_s(right)) / unit_s - old[targets]
        same_point = (b[1] == a[1])[:, None]
        same_load = same_point & (b[0] == a[0])[:, None]
        rise_a = _rise(loads[a], gain_a + np.where(same_load, gain_b, 0.0), squarings)
        rise_b = np.where(same_load, 0.0, _rise(loads[b], gain_b, squarings))
        powers = _raised(loads, squarings).sum(axis=0)
        change = _root(powers[a[1]] + rise_a + np.where(same_point, rise_b, 0.0), squarings)
        change -= _root(powers[a[1]], squarings)
        other = _root(powers[b[1]] + rise_b, squarings) - _root(powers[b[1]], squarings)
        total: FloatArray = (change + np.where(same_point, 0.0, other)).sum(axis=-1)
        return total


def _rise(load: FloatArray, gain: FloatArray, squarings: int) -> FloatArray:
    """Growth of the power of a load that gains something."""
    return _raised(load + gain, squarings) - _raised(load, squarings)


def _raised(value: FloatArray, squarings: int) -> FloatArray:
    """``value ** (2 ** squarings)``; much faster than a general power."""
    for _ in range(squarings):
        value = value * value
    return value


def _root(value: FloatArray, squarings: int) -> FloatArray:
    """The inverse of :func:`_raised`; rounding may have left less than nothing."""
    value = np.maximum(value, 0.0)
    for _ in range(squarings):
        value = np.sqrt(value)
    return value
