"""Moves and swaps of samples between two bins of a step whose costs need not add up (padding)."""

from __future__ import annotations

import dataclasses

import numpy as np

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.scheduling.problem import FloatArray, IntArray
from dflop_ds.scheduling.rank_step import Bins, RankStep, step_time_s

_MAX_ROUNDS = 256
_SOURCES = 4
_PARTNERS = 4
_RELATIVE_GAIN = 1e-9


def refine(step: RankStep, bins: Bins, cost: MicrobatchCost) -> Bins:
    """Exchange samples between late bins and light ones while the step gets shorter.

    Of all moves and swaps between two bins the one with the shortest predicted step is taken; among equals,
    the one that lowers the larger of the two bins. Hard limits are never broken, no bin becomes empty.
    """
    state = _State(step, [list(members) for members in bins], cost)
    for _ in range(_MAX_ROUNDS):
        move = _next_exchange(state)
        if move is None:
            break
        state.apply(move)
    return tuple(tuple(sorted(members)) for members in state.bins)


def _next_exchange(state: _State) -> _Exchange | None:
    """The best exchange of the worst bin that has any."""
    for source, partners in state.critical():
        found = [move for target in partners if (move := state.best_exchange(source, target)) is not None]
        if found:
            return min(found, key=lambda move: (move.step_s, move.peak_s, move.target))
    return None


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Samples `given` leaves `source` for `target`, which gives `taken` (or nothing, -1) in return."""

    source: int
    target: int
    given: int
    taken: int
    step_s: float
    peak_s: float


class _State:
    """Bins and their phases, shape (num_ranks, num_slots, 2)."""

    def __init__(self, step: RankStep, bins: list[list[int]], cost: MicrobatchCost) -> None:
        self._step, self._cost, self.bins = step, cost, bins
        self.phases_s = step.by_rank(cost.phases_s(step.sizes(bins)))

    def critical(self) -> list[tuple[int, list[int]]]:
        """Bins that hold the others up, worst first, each with the bins that could take load from it."""
        num_slots, sync = self._step.num_slots, self._step.sync
        if sync == "step":
            loads_s = self.phases_s.sum(axis=(1, 2))
            rank = int(loads_s.argmax())
            others = [int(other) for other in np.argsort(loads_s, kind="stable")[:_PARTNERS] if other != rank]
            partners = [other * num_slots + slot for other in others for slot in range(num_slots)]
            slots = np.argsort(-self.phases_s[rank].sum(axis=1), kind="stable")[:_SOURCES]
            return [(rank * num_slots + int(slot), partners) for slot in slots]
        load_s = self.phases_s if sync == "phase" else self.phases_s.sum(axis=2, keepdims=True)
        waits_s = load_s.max(axis=0) - load_s.mean(axis=0)
        slack_s = (load_s.max(axis=0) - load_s).sum(axis=2)
        roomy = [int(bin_index) for bin_index in np.argsort(-slack_s.ravel(), kind="stable")[:_PARTNERS]]
        found = []
        for index in np.argsort(-waits_s.ravel(), kind="stable")[:_SOURCES]:
            slot, phase = (int(value) for value in np.unravel_index(int(index), waits_s.shape))
            column_s = load_s[:, slot, phase]
            source = int(column_s.argmax()) * num_slots + slot
            lightest = [
                int(rank) * num_slots + slot for rank in np.argsort(column_s, kind="stable")[:_PARTNERS]
            ]
            found.append((source, [other for other in dict.fromkeys(lightest + roomy) if other != source]))
        return found

    def best_exchange(self, source: int, target: int) -> _Exchange | None:
        """The best exchange between two bins, or None if none is an improvement."""
        a, b = np.array(self.bins[source]), np.array(self.bins[target])
        if not len(a) or not len(b):
            return None
        left, right = self._source_sizes(a, b), self._target_sizes(a, b)
        left_s, right_s = self._cost.phases_s(left), self._cost.phases_s(right)
        step_s = self._step_times_s(source, target, left_s, right_s)
        peak_s = np.maximum(left_s.sum(axis=-1), right_s.sum(axis=-1))
        step_s[~(self._allowed(left) & self._allowed(right))] = np.inf
        if len(a) == 1:
            step_s[:, -1] = np.inf
        now_s = step_time_s(self.phases_s, self._step.sync)
        old_peak_s = max(self._total_s(source), self._total_s(target))
        better = step_s < now_s * (1 - _RELATIVE_GAIN)
        calmer = (step_s <= now_s) & (peak_s < old_peak_s * (1 - _RELATIVE_GAIN))
        if not (better | calmer).any():
            return None
        score = np.where(better | calmer, step_s, np.inf)
        least = np.flatnonzero(score.ravel() == score.min())
        best = int(least[peak_s.ravel()[least].argmin()])
        row, column = np.unravel_index(best, score.shape)
        taken = int(b[column]) if column < len(b) else -1
        return _Exchange(source, target, int(a[row]), taken, float(score.min()), float(peak_s.ravel()[best]))

    def apply(self, move: _Exchange) -> None:
        """Carry an exchange out."""
        self.bins[move.source].remove(move.given)
        self.bins[move.target].append(move.given)
        if move.taken >= 0:
            self.bins[move.target].remove(move.taken)
            self.bins[move.source].append(move.taken)
        changed = [move.source, move.target]
        sizes = self._step.sizes([self.bins[index] for index in changed])
        for index, phases_s in zip(changed, self._cost.phases_s(sizes), strict=True):
            self.phases_s[divmod(index, self._step.num_slots)] = phases_s

    def _total_s(self, index: int) -> float:
        return float(self.phases_s[divmod(index, self._step.num_slots)].sum())

    def _allowed(self, sizes: MicrobatchSizes) -> np.ndarray:
        allowed = np.ones(sizes.tokens.shape, dtype=np.bool_)
        if self._step.max_tokens is not None:
            allowed &= sizes.tokens <= self._step.max_tokens
        if self._step.max_encoder_inputs is not None:
            allowed &= sizes.encoder_inputs <= self._step.max_encoder_inputs
        return allowed

    def _source_sizes(self, a: IntArray, b: IntArray) -> MicrobatchSizes:
        """Sizes of the source after each exchange, shape (len(a), len(b) + 1).

        It loses its i-th sample and gets the j-th of the target, or none in the last column.
        """
        tokens, inputs = self._step.llm_tokens, self._step.encoder_inputs
        got, got_inputs = np.append(tokens[b], 0.0)[None, :], np.append(inputs[b], 0.0)[None, :]
        gets = np.append(np.ones(len(b)), 0.0)[None, :]
        new_inputs = inputs[a].sum() - inputs[a][:, None] + got_inputs
        if self._step.padded:
            longest = np.maximum(_longest_without(tokens[a])[:, None], got)
            return _padded(len(a) - 1 + gets, longest, new_inputs)
        lost = tokens[a][:, None]
        squares = (tokens[a] ** 2).sum() - lost**2 + got**2
        return MicrobatchSizes(tokens[a].sum() - lost + got, squares, new_inputs)

    def _target_sizes(self, a: IntArray, b: IntArray) -> MicrobatchSizes:
        """Sizes of the target after each exchange: it gets the i-th of the source, loses its j-th or none."""
        tokens, inputs = self._step.llm_tokens, self._step.encoder_inputs
        lost, lost_inputs = np.append(tokens[b], 0.0)[None, :], np.append(inputs[b], 0.0)[None, :]
        loses = np.append(np.ones(len(b)), 0.0)[None, :]
        new_inputs = inputs[b].sum() - lost_inputs + inputs[a][:, None]
        got = tokens[a][:, None]
        if self._step.padded:
            rest = np.append(_longest_without(tokens[b]), tokens[b].max())[None, :]
            return _padded(len(b) + 1 - loses, np.maximum(rest, got), new_inputs)
        squares = (tokens[b] ** 2).sum() - lost**2 + got**2
        return MicrobatchSizes(tokens[b].sum() - lost + got, squares, new_inputs)

    def _step_times_s(self, source: int, target: int, left_s: FloatArray, right_s: FloatArray) -> FloatArray:
        """Step time after each exchange, shape (len(a), len(b) + 1)."""
        num_slots, sync = self._step.num_slots, self._step.sync
        (rank_a, slot_a), (rank_b, slot_b) = divmod(source, num_slots), divmod(target, num_slots)
        rest_s = self.phases_s.copy()
        rest_s[rank_a, slot_a] = rest_s[rank_b, slot_b] = 0.0
        times_s: FloatArray
        if sync == "step":
            loads_s = rest_s.sum(axis=(1, 2))
            a_s, b_s = left_s.sum(axis=-1), right_s.sum(axis=-1)
            if rank_a == rank_b:
                pair_s = loads_s[rank_a] + a_s + b_s
            else:
                pair_s = np.maximum(loads_s[rank_a] + a_s, loads_s[rank_b] + b_s)
            others_s = np.delete(loads_s, [rank_a, rank_b])
            times_s = np.maximum(pair_s, others_s.max(initial=0.0))
            return times_s
        if sync == "microbatch":
            rest_s = rest_s.sum(axis=2, keepdims=True)
            left_s, right_s = left_s.sum(axis=-1, keepdims=True), right_s.sum(axis=-1, keepdims=True)
        slots_s = rest_s.max(axis=0)
        if slot_a == slot_b:
            changed_s = np.maximum(np.maximum(left_s, right_s), slots_s[slot_a])
        else:
            changed_s = np.maximum(left_s, slots_s[slot_a]) + np.maximum(right_s, slots_s[slot_b])
        times_s = changed_s.sum(axis=-1) + np.delete(slots_s, [slot_a, slot_b], axis=0).sum()
        return times_s


def _padded(counts: FloatArray, longest: FloatArray, encoder_inputs: FloatArray) -> MicrobatchSizes:
    return MicrobatchSizes(counts * longest, counts * longest**2, encoder_inputs)


def _longest_without(tokens: FloatArray) -> FloatArray:
    """Longest of the others, for each sample; 0 for a lone one."""
    if len(tokens) == 1:
        return np.zeros(1)
    second, first = np.sort(tokens)[-2:]
    result = np.full(len(tokens), first)
    result[int(tokens.argmax())] = second
    return result
