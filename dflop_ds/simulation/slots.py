"""The 1F1B recurrence: when every stage runs in every slot, for many pipelines at once.

Slots are the common clock of :mod:`dflop_ds.simulation.schedule`. In a slot a stage that runs a forward
meets the stage before it and a stage that runs a backward the stage behind it, so stages meet in disjoint
pairs; what they hand over was computed in the slot before. A step is therefore one pass over the slots in
which all stages, replicas and cases advance together.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from dflop_ds.simulation.schedule import num_slots

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NEVER = -np.inf
"""Length of a transfer that does not take place."""


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Slots of all forwards and backwards.

    Attributes
    ----------
    num_slots, num_stages, num_microbatches : int
    stages : ndarray of int64, shape (num_stages, 1)
    forward, backward : ndarray of int64, shape (num_stages, num_microbatches)
        Slot of each pass.
    microbatch : ndarray of int64, shape (num_slots, num_stages)
        Microbatch that a stage works on; -1 in an idle slot.
    is_forward : ndarray of bool, shape (num_slots, num_stages)
    """

    num_slots: int
    num_stages: int
    num_microbatches: int
    stages: IntArray
    forward: IntArray
    backward: IntArray
    microbatch: IntArray
    is_forward: npt.NDArray[np.bool_]


@functools.lru_cache(maxsize=256)
def slots_of(num_stages: int, num_microbatches: int) -> Slots:
    """Slots of a pipeline; the arrays are shared and read-only."""
    stages = np.arange(num_stages)[:, None]
    index = np.arange(num_microbatches)[None, :]
    # `forward_slot` and `backward_slot` of the schedule, for all at once.
    forward = 2 * index + stages
    backward = 2 * (index + num_stages) - 1 - stages
    count = num_slots(num_stages, num_microbatches)
    microbatch = np.full((count, num_stages), -1, dtype=np.int64)
    is_forward = np.zeros((count, num_stages), dtype=np.bool_)
    microbatch[forward, stages] = index
    microbatch[backward, stages] = index
    is_forward[forward, stages] = True
    result = Slots(count, num_stages, num_microbatches, stages, forward, backward, microbatch, is_forward)
    for array in (stages, forward, backward, microbatch, is_forward):
        array.setflags(write=False)
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class Transfers:
    """What travels between the stages, by slot of arrival; edge ``e`` joins stages ``e`` and ``e + 1``.

    Attributes
    ----------
    activation_s, gradient_s : ndarray, shape (num_slots, num_stages - 1, ...)
        Seconds that the message occupies its link; `NEVER` where there is none. Trailing axes broadcast
        against those of the durations.
    latency_s : ndarray, shape (num_stages - 1, ...)
        Seconds that each message takes besides.
    rendezvous : bool
        Both stages are held until the transfer ends, as with blocking sends; else only the receiver waits.
    queued : bool
        Messages of one link and direction follow one another; without effect under `rendezvous`.
    borders : tuple of int
        Edges at which every lane (last axis) waits for all lanes of the neighbour stage.
    """

    activation_s: FloatArray
    gradient_s: FloatArray
    latency_s: FloatArray
    rendezvous: bool = False
    queued: bool = False
    borders: tuple[int, ...] = ()


@functools.lru_cache(maxsize=256)
def has_transfer(num_stages: int, num_microbatches: int) -> tuple[npt.NDArray[np.bool_], ...]:
    """Whether an activation, and a gradient, arrives over an edge in a slot, shapes (num_slots, edges)."""
    slots = slots_of(num_stages, num_microbatches)
    runs = slots.microbatch >= 0
    activation = runs[:, 1:] & slots.is_forward[:, 1:]
    gradient = runs[:, :-1] & ~slots.is_forward[:, :-1]
    return activation, gradient


def constant_transfers(num_stages: int, num_microbatches: int, send_s: float) -> Transfers:
    """Every message arrives `send_s` after it was computed; links carry any number at once."""
    present = has_transfer(num_stages, num_microbatches)
    activation_s, gradient_s = (np.where(each, 0.0, NEVER)[..., None] for each in present)
    return Transfers(activation_s, gradient_s, np.full((num_stages - 1, 1), send_s))


def in_slots(slots: Slots, forward: FloatArray, backward: FloatArray) -> FloatArray:
    """Values of passes, shape (num_stages, num_microbatches, ...), as (num_slots, num_stages, ...)."""
    result = np.zeros((slots.num_slots, slots.num_stages, *forward.shape[2:]))
    result[slots.forward, slots.stages] = forward
    result[slots.backward, slots.stages] = backward
    return result


def run(durations_s: FloatArray, transfers: Transfers) -> tuple[FloatArray, FloatArray]:
    """Run all slots.

    Parameters
    ----------
    durations_s : ndarray, shape (num_slots, num_stages, ...)
        Seconds of the pass in each slot; 0 in an idle slot.
    transfers : Transfers

    Returns
    -------
    start_s, end_s : ndarray, shape of `durations_s`
        Of the pass in each slot; in an idle slot both are the time at which the stage is free.
    """
    start_s, end_s = np.empty_like(durations_s), np.empty_like(durations_s)
    free_s = np.zeros(durations_s.shape[1:])
    meet = _rendezvous if transfers.rendezvous else _Overlapped(transfers, free_s.shape).meet
    for slot, (start, end) in enumerate(zip(start_s, end_s, strict=True)):
        start[...] = free_s
        if durations_s.shape[1] > 1:
            meet(slot, free_s, start, transfers)
        free_s = np.add(start, durations_s[slot], out=end)
    return start_s, end_s


def _edges(slot: int, num_stages: int) -> tuple[slice, slice]:
    """Edges over which stages meet in a slot, which number the stages before them, and the stages behind."""
    first = (slot + 1) % 2
    return slice(first, num_stages - 1, 2), slice(first + 1, num_stages, 2)


def _join_lanes(values: FloatArray, slot: int, borders: tuple[int, ...]) -> None:
    """At the borders every lane gets the latest of all lanes."""
    first = (slot + 1) % 2
    for border in borders:
        if (border - first) % 2 == 0:
            row = values[(border - first) // 2]
            row[...] = row.max(axis=-1, keepdims=True)


def _rendezvous(slot: int, free_s: FloatArray, start: FloatArray, transfers: Transfers) -> None:
    edges, behind = _edges(slot, len(free_s))
    activation_s, gradient_s = transfers.activation_s[slot, edges], transfers.gradient_s[slot, edges]
    latency_s = transfers.latency_s[edges]
    has_activation, has_gradient = activation_s > NEVER, gradient_s > NEVER
    cost_s = np.where(has_activation, activation_s + latency_s, 0.0)
    cost_s = cost_s + np.where(has_gradient, gradient_s + latency_s, 0.0)
    cost_s = np.where(has_activation | has_gradient, cost_s, NEVER)
    met_s = np.maximum(free_s[edges], free_s[behind]) + cost_s
    _join_lanes(met_s, slot, transfers.borders)
    start[edges] = np.maximum(free_s[edges], met_s)
    start[behind] = np.maximum(free_s[behind], met_s)


class _Overlapped:
    """Sends that leave the sender free; keeps when each link is free again."""

    def __init__(self, transfers: Transfers, shape: tuple[int, ...]) -> None:
        self._queued = transfers.queued
        if self._queued:
            self._down_s, self._up_s = np.zeros((2, max(0, shape[0] - 1), *shape[1:]))

    def meet(self, slot: int, free_s: FloatArray, start: FloatArray, transfers: Transfers) -> None:
        edges, behind = _edges(slot, len(free_s))
        activation_s, gradient_s = free_s[edges], free_s[behind]
        if self._queued:
            activation_s = np.maximum(activation_s, self._down_s[edges])
            gradient_s = np.maximum(gradient_s, self._up_s[edges])
        activation_s = activation_s + transfers.activation_s[slot, edges]
        gradient_s = gradient_s + transfers.gradient_s[slot, edges]
        if self._queued:
            self._down_s[edges] = np.maximum(self._down_s[edges], activation_s)
            self._up_s[edges] = np.maximum(self._up_s[edges], gradient_s)
        for arrival_s, receiver in ((activation_s, behind), (gradient_s, edges)):
            arrival_s += transfers.latency_s[edges]
            _join_lanes(arrival_s, slot, transfers.borders)
            np.maximum(start[receiver], arrival_s, out=start[receiver])
