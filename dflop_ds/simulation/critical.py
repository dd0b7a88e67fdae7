"""The critical path of a simulated step: which microbatches on which ranks made the others wait."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from dflop_ds.simulation.step import Grid, StepResult

SegmentKind = Literal["forward", "backward", "transfer"]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of the critical path.

    Attributes
    ----------
    kind : {"forward", "backward", "transfer"}
        transfer: from the end of a pass to the start of the one that waited for its output.
    module, replica, stage, microbatch : int
        Where it ran; of a transfer, the rank that it held up. `replica` and `stage` count within the module.
    start_s, end_s : float
    excess_s : float
        How much longer this pass took than the mean of its stage and direction; 0.0 for a transfer.
    """

    kind: SegmentKind
    module: int
    replica: int
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    excess_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A microbatch on the critical path.

    Attributes
    ----------
    module, replica, microbatch : int
    on_path_s : float
        Compute of it that lies on the path.
    excess_s : float
        How much longer that took than the means of the stages: what an average microbatch would save.
    """

    module: int
    replica: int
    microbatch: int
    on_path_s: float
    excess_s: float


@dataclasses.dataclass(frozen=True)
class CriticalPath:
    """The chain of passes and transfers that decides a step, up to the gradient reduction.

    Attributes
    ----------
    segments : tuple of Segment
        In order of time, without gaps from 0 to the end.
    culprits : tuple of Culprit
        Microbatches of the path, largest excess first.
    replica_wait_s : dict of (int, int) to float
        Seconds for which a replica (module, replica) waits for the slowest one at the reduction, in the
        stage where it waits least.
    """

    segments: tuple[Segment, ...]
    culprits: tuple[Culprit, ...]
    replica_wait_s: dict[tuple[int, int], float]


def critical_path(result: StepResult, case: int = 0) -> CriticalPath:
    """Critical path of one simulated step.

    Parameters
    ----------
    result : StepResult
        Of :func:`dflop_ds.simulation.step.simulate_steps`.
    case : int
    """
    stage = int(result.reduced_s[case].argmax())
    segments = tuple(reversed(list(_walk_back(result, case, stage))))
    sums: dict[tuple[int, int, int], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for each in segments:
        if each.kind != "transfer":
            total = sums[each.module, each.replica, each.microbatch]
            total[0] += each.end_s - each.start_s
            total[1] += each.excess_s
    culprits = [Culprit(*key, *seconds) for key, seconds in sums.items()]
    culprits.sort(key=lambda each: (-each.excess_s, each.module, each.replica, each.microbatch))
    return CriticalPath(segments, tuple(culprits), _waits_s(result, case))


@dataclasses.dataclass(frozen=True)
class _Place:
    stage: int
    replica: int
    lane: int


def _walk_back(result: StepResult, case: int, stage: int) -> Iterator[Segment]:
    """Segments from the last to the first."""
    grid = result.grid
    start_s, end_s = grid.start_s[:, :, case], grid.end_s[:, :, case]
    last = end_s[-1, stage]
    place = _Place(stage, *(int(axis) for axis in np.unravel_index(int(last.argmax()), last.shape)))
    slot = grid.slots.num_slots - 1
    while slot >= 0:
        here = (slot, place.stage, place.replica, place.lane)
        begin_s, stop_s = float(start_s[here]), float(end_s[here])
        microbatch = int(grid.slots.microbatch[slot, place.stage])
        if microbatch >= 0 and stop_s > begin_s:
            yield _pass(result, case, place, slot, (begin_s, stop_s))
        before_s, before = _cause(grid, end_s, slot, place, begin_s)
        if begin_s > before_s:
            module, own_stage, replica = _locate(grid, place)
            if microbatch < 0:  # it only sends: what its neighbour takes over
                microbatch = int(grid.slots.microbatch[slot, _neighbour(slot, place.stage)])
            yield Segment("transfer", module, replica, own_stage, microbatch, before_s, begin_s)
        place, slot = before, slot - 1


def _cause(grid: Grid, end_s: np.ndarray, slot: int, place: _Place, begin_s: float) -> tuple[float, _Place]:
    """What a stage waited for before `begin_s`: its own slot before, or that of its neighbour."""
    if slot == 0:
        return 0.0, place
    own_s = float(end_s[slot - 1, place.stage, place.replica, place.lane])
    if begin_s <= own_s:
        return own_s, place
    neighbour = _neighbour(slot, place.stage)
    lane = place.lane
    if max(place.stage, neighbour) in grid.first_stages[1:-1]:
        lane = int(end_s[slot - 1, neighbour, place.replica].argmax())
        if grid.rendezvous:
            # All replicas on both sides of a border meet.
            own_lane = int(end_s[slot - 1, place.stage, place.replica].argmax())
            own_s = float(end_s[slot - 1, place.stage, place.replica, own_lane])
            place = dataclasses.replace(place, lane=own_lane)
    other = _Place(neighbour, place.replica, lane)
    other_s = float(end_s[slot - 1, neighbour, place.replica, lane])
    if grid.rendezvous and own_s >= other_s:
        return own_s, place
    return other_s, other


def _neighbour(slot: int, stage: int) -> int:
    """The stage that a stage meets in a slot: in slots of forwards the one before it."""
    return stage - 1 if (slot - stage) % 2 == 0 else stage + 1


def _locate(grid: Grid, place: _Place) -> tuple[int, int, int]:
    """Module, and stage and replica within it."""
    module = int(np.searchsorted(grid.first_stages, place.stage, side="right")) - 1
    lanes = grid.lanes[module]
    return module, place.stage - grid.first_stages[module], place.replica * lanes + place.lane % lanes


def _pass(result: StepResult, case: int, place: _Place, slot: int, span_s: tuple[float, float]) -> Segment:
    module, stage, replica = _locate(result.grid, place)
    forward = bool(result.grid.slots.is_forward[slot, place.stage])
    found = result.modules[module]
    if forward:
        durations_s = found.forward_end_s[case, :, stage] - found.forward_start_s[case, :, stage]
    else:
        durations_s = found.backward_end_s[case, :, stage] - found.backward_start_s[case, :, stage]
    return Segment(
        "forward" if forward else "backward",
        module,
        replica,
        stage,
        int(result.grid.slots.microbatch[slot, place.stage]),
        *span_s,
        excess_s=span_s[1] - span_s[0] - float(durations_s.mean()),
    )


def _waits_s(result: StepResult, case: int) -> dict[tuple[int, int], float]:
    grid = result.grid
    waits = {}
    for module, lanes in enumerate(grid.lanes):
        stages = slice(*grid.first_stages[module : module + 2])
        ends_s = grid.end_s[-1, stages, case, :, :lanes]
        ends_s = ends_s.reshape(len(ends_s), -1)
        least_s = (ends_s.max(axis=1, keepdims=True) - ends_s).min(axis=0)
        waits.update({(module, replica): float(wait_s) for replica, wait_s in enumerate(least_s)})
    return waits
