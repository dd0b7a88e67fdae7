"""Simulation of whole optimizer steps: modules, replicas, transfers, reduction, optimizer.

A module (encoder, LLM, or the whole model) is a run of pipeline stages with one number of data-parallel
replicas. Modules with different numbers of replicas form ``g = gcd(...)`` *super-replicas*; inside one, the
replicas of a module work on parts of the same microbatch side by side, and at the border between two
modules every replica of one needs the parts of all replicas of the other: fan-in of activations, fan-out
of gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.network import Link
from dflop_ds.simulation.slots import (
    NEVER,
    FloatArray,
    Slots,
    Transfers,
    has_transfer,
    in_slots,
    run,
    slots_of,
)
from dflop_ds.simulation.work import ModuleWork, Network, StepEnd, checked_works, per_stage


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleResult:
    """One module of simulated steps, seconds from the first forward.

    Attributes
    ----------
    forward_start_s, forward_end_s, backward_start_s, backward_end_s : ndarray
        Shape (num_cases, num_replicas, num_stages, num_microbatches).
    busy_s, idle_s : ndarray, shape (num_cases, num_replicas, num_stages)
        Compute, and the rest of the makespan.
    peak_activation_bytes : ndarray, shape (num_cases, num_replicas, num_stages), or None
        Most bytes kept at once; None where the bytes were not given.
    """

    forward_start_s: FloatArray
    forward_end_s: FloatArray
    backward_start_s: FloatArray
    backward_end_s: FloatArray
    busy_s: FloatArray
    idle_s: FloatArray
    peak_activation_bytes: FloatArray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """All slots of all pipelines; lanes are the replicas of a super-replica.

    Attributes
    ----------
    slots : Slots
    start_s, end_s : ndarray, shape (num_slots, num_stages, num_cases, num_super_replicas, num_lanes)
        A module with fewer replicas than lanes occurs repeatedly.
    first_stages : tuple of int, length num_modules + 1
    lanes : tuple of int, length num_modules
        Replicas of each module in a super-replica.
    rendezvous : bool
    """

    slots: Slots
    start_s: FloatArray
    end_s: FloatArray
    first_stages: tuple[int, ...]
    lanes: tuple[int, ...]
    rendezvous: bool


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """Simulated steps.

    Attributes
    ----------
    step_time_s : ndarray, shape (num_cases,)
        First forward to the end of the step.
    makespan_s : ndarray, shape (num_cases,)
        First forward to last backward of all replicas.
    bubble_fraction : ndarray, shape (num_cases,)
        ``1 - busy / (ranks * makespan)`` over all ranks; 0.0 if the makespan is 0.
    ready_s, reduced_s : ndarray, shape (num_cases, num_stages)
        When the last replica of a stage is ready to reduce, and when the reduction has ended.
    modules : tuple of ModuleResult
    grid : Grid
        Raw times, for :func:`dflop_ds.simulation.critical.critical_path`.
    """

    step_time_s: FloatArray
    makespan_s: FloatArray
    bubble_fraction: FloatArray
    ready_s: FloatArray
    reduced_s: FloatArray
    modules: tuple[ModuleResult, ...]
    grid: Grid


def simulate_steps(
    modules: ModuleWork | Sequence[ModuleWork], *, network: Network | None = None, end: StepEnd | None = None
) -> StepResult:
    """Simulate optimizer steps of one pipeline shape, all cases and replicas at once.

    Every stage runs its work in 1F1B order, each pass as soon as the one before has ended and its input has
    arrived. Replicas of a stage join at the gradient reduction, all stages at the end of the step.

    Parameters
    ----------
    modules : ModuleWork or sequence of ModuleWork
        In pipeline order; one for a pipeline whose stages all have the same replicas.
    network : Network, optional
        By default transfers take no time.
    end : StepEnd, optional
        By default nothing follows the last backward.

    Raises
    ------
    SchedulingError
        If shapes do not fit, or a time or size is negative, NaN or infinite.
    """
    parts = [modules] if isinstance(modules, ModuleWork) else list(modules)
    network, end = network or Network(), end or StepEnd()
    works = checked_works(parts)
    num_cases, _, _, num_microbatches = works[0].forward_s.shape
    num_supers = math.gcd(*(work.forward_s.shape[1] for work in works))
    lanes = tuple(work.forward_s.shape[1] // num_supers for work in works)
    edges = [0, *np.cumsum([work.forward_s.shape[2] for work in works]).tolist()]
    slots = slots_of(edges[-1], num_microbatches)
    forward_s, backward_s = (
        np.concatenate([_by_lane(getattr(work, name), num_supers, max(lanes)) for work in works])
        for name in ("forward_s", "backward_s")
    )
    transfers = _transfers(works, network, slots, num_supers, lanes, tuple(edges))
    shape = (slots.num_slots, edges[-1], num_cases, num_supers, max(lanes))
    durations_s = in_slots(slots, forward_s, backward_s)
    start_s, end_s = run(durations_s.reshape(*shape[:2], -1, shape[-1]), transfers)
    grid = Grid(
        slots,
        start_s.reshape(shape),
        end_s.reshape(shape),
        tuple(edges),
        lanes,
        network.sends == "rendezvous",
    )
    return _result(works, grid, end)


def _by_lane(values: FloatArray, num_supers: int, num_lanes: int) -> FloatArray:
    """(cases, replicas, stages, microbatches) -> (stages, microbatches, cases, super-replicas, lanes)."""
    cases, replicas, stages, microbatches = values.shape
    own = replicas // num_supers
    by_super = values.reshape(cases, num_supers, own, stages, microbatches)
    split: FloatArray = by_super.transpose(3, 4, 0, 1, 2)
    return split if own == num_lanes else split[..., np.arange(num_lanes) % own]


def _transfers(
    works: Sequence[ModuleWork],
    network: Network,
    slots: Slots,
    num_supers: int,
    lanes: tuple[int, ...],
    first_stages: tuple[int, ...],
) -> Transfers:
    """Seconds of every message; at a border those of the busiest replica of a super-replica."""
    num_edges = slots.num_stages - 1
    links = [network.links] * num_edges if isinstance(network.links, Link) else list(network.links)
    if len(links) != num_edges or network.sends not in ("overlapped", "rendezvous"):
        raise SchedulingError(
            f'a network needs one link for each of {num_edges} neighbours and sends that are "overlapped" or '
            f'"rendezvous", found {len(links)} links and {network.sends!r}. Correct the network.'
        )
    latency_s = np.array([link.latency_s for link in links]).reshape(-1, 1, 1)
    borders = tuple(stage - 1 for stage in first_stages[1:-1])
    joined = borders if max(lanes) > 1 else ()
    is_activation, is_gradient = has_transfer(slots.num_stages, slots.num_microbatches)
    rendezvous = network.sends == "rendezvous"
    if all(work.output_bytes is None for work in works):
        free_s = [np.where(each, 0.0, NEVER)[..., None, None] for each in (is_activation, is_gradient)]
        return Transfers(free_s[0], free_s[1], latency_s, rendezvous, False, joined)
    sizes = _sent_bytes(works, num_supers, lanes)
    bandwidth = np.array([link.bandwidth_bytes_per_s for link in links])
    num_pipelines = sizes.shape[2] * sizes.shape[3]
    seconds = sizes.reshape(*sizes.shape[:2], num_pipelines, max(lanes)) / bandwidth[:, None, None, None]
    activation_s = np.full((slots.num_slots, num_edges, *seconds.shape[2:]), NEVER)
    gradient_s = activation_s.copy()
    edge = slots.stages[:-1]
    activation_s[slots.forward[1:], edge] = seconds
    gradient_s[slots.backward[:-1], edge] = seconds
    return Transfers(activation_s, gradient_s, latency_s, rendezvous, not rendezvous, joined)


def _sent_bytes(works: Sequence[ModuleWork], num_supers: int, lanes: tuple[int, ...]) -> FloatArray:
    """Bytes over each edge, shape (num_stages - 1, microbatches, cases, super-replicas, lanes)."""
    sizes = []
    for index, work in enumerate(works):
        given = np.zeros_like(work.forward_s) if work.output_bytes is None else work.output_bytes
        size = _by_lane(given, num_supers, max(lanes))
        if index < len(works) - 1 and max(lanes) > 1:
            own = size[-1, ..., : lanes[index]]
            busiest = np.maximum(own.max(axis=-1), own.sum(axis=-1) / lanes[index + 1])
            size = np.concatenate([size[:-1], np.broadcast_to(busiest[..., None], size[-1:].shape)])
        sizes.append(size)
    return np.concatenate(sizes)[:-1]


def _result(works: Sequence[ModuleWork], grid: Grid, end: StepEnd) -> StepResult:
    slots = grid.slots
    forward_end_s = grid.end_s[slots.forward, slots.stages]
    backward_end_s = grid.end_s[slots.backward, slots.stages]
    makespan_s: FloatArray = backward_end_s.max(axis=(0, 1, 3, 4))
    forward_start_s = grid.start_s[slots.forward, slots.stages]
    backward_start_s = grid.start_s[slots.backward, slots.stages]
    results = []
    for index, work in enumerate(works):
        own = (slice(*grid.first_stages[index : index + 2]), ..., slice(grid.lanes[index]))
        busy_s = work.forward_s.sum(axis=-1) + work.backward_s.sum(axis=-1)
        behind = slots.num_stages - grid.first_stages[index]
        peak = None if work.activation_bytes is None else _peak_bytes(work.activation_bytes, behind)
        result = ModuleResult(
            forward_start_s=_by_replica(forward_start_s[own]),
            forward_end_s=_by_replica(forward_end_s[own]),
            backward_start_s=_by_replica(backward_start_s[own]),
            backward_end_s=_by_replica(backward_end_s[own]),
            busy_s=busy_s,
            idle_s=makespan_s[:, None, None] - busy_s,
            peak_activation_bytes=peak,
        )
        results.append(result)
    num_ranks = sum(work.forward_s.shape[1] * work.forward_s.shape[2] for work in works)
    busy_s = np.sum([each.busy_s.sum(axis=(1, 2)) for each in results], axis=0)
    capacity_s = num_ranks * makespan_s
    bubble = 1.0 - np.divide(busy_s, capacity_s, out=np.ones_like(busy_s), where=capacity_s > 0)
    ready_s: FloatArray = grid.end_s[-1].max(axis=(2, 3)).T
    reduced_s = ready_s + per_stage(end.reduce_s, "reduce_s", ready_s.shape)
    optimizer_s = per_stage(end.optimizer_s, "optimizer_s", ready_s.shape)
    begin_s = reduced_s.max(axis=1, keepdims=True) if end.clips_gradients else reduced_s
    fixed_s = float(per_stage(end.fixed_s, "fixed_s", ()))
    step_time_s: FloatArray = (begin_s + optimizer_s).max(axis=1) + fixed_s
    return StepResult(
        step_time_s=step_time_s,
        makespan_s=makespan_s,
        bubble_fraction=np.maximum(0.0, bubble),
        ready_s=ready_s,
        reduced_s=reduced_s,
        modules=tuple(results),
        grid=grid,
    )


def _by_replica(values: FloatArray) -> FloatArray:
    """Inverse of `_by_lane`."""
    stages, microbatches, cases, supers, lanes = values.shape
    by_replica: FloatArray = values.transpose(2, 3, 4, 0, 1).reshape(
        cases, supers * lanes, stages, microbatches
    )
    return by_replica


def _peak_bytes(kept: FloatArray, num_behind: int) -> FloatArray:
    """Most bytes kept at once by 1F1B; `num_behind` stages follow the first one, itself included.

    While stage ``s`` of ``p`` runs a forward it keeps the last ``p - s`` microbatches, that one included
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    num_microbatches = kept.shape[-1]
    sums = np.concatenate([np.zeros_like(kept[..., :1]), np.cumsum(kept, axis=-1)], axis=-1)
    result = np.empty(kept.shape[:-1])
    for stage in range(kept.shape[2]):
        width = min(num_behind - stage, num_microbatches)
        windows = sums[:, :, stage, width:] - sums[:, :, stage, : num_microbatches + 1 - width]
        result[:, :, stage] = windows.max(axis=-1)
    return result
