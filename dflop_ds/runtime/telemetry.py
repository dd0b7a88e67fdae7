"""When each stage computed, as measured: one record per pipeline instruction.

The records are taken by wrapping the instruction map *of one engine instance*, so a stock
``PipelineEngine`` can be observed in the same way as ours.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from dflop_ds.runtime import compat, distributed
from dflop_ds.simulation.trace import TraceEvent

_KEPT_STEPS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionRecord:
    """One executed instruction.

    Attributes
    ----------
    name : str
        DeepSpeed's instruction name, e.g. ``ForwardPass``.
    microbatch : int
        Running number of this instruction within the step, which for compute is the microbatch.
    start_s, duration_s : float
        Relative to the start of the step on this rank's own clock.
    """

    name: str
    microbatch: int
    start_s: float
    duration_s: float


@dataclasses.dataclass
class StepRecord:
    """One optimizer step on one rank.

    Attributes
    ----------
    start_s : float
        Host monotonic clock; comparable between the ranks of one machine only.
    duration_s : float
    instructions : list of InstructionRecord
    number : int
        Steps recorded so far, this one included.
    """

    start_s: float
    duration_s: float = 0.0
    instructions: list[InstructionRecord] = dataclasses.field(default_factory=list)
    number: int = 1

    def compute(self) -> list[InstructionRecord]:
        """Forward and backward passes only."""
        return [record for record in self.instructions if record.name in _COMPUTE_NAMES]


_COMPUTE_NAMES = frozenset(instruction.__name__ for instruction in compat.COMPUTE_INSTRUCTIONS)


class Telemetry:
    """Step records of one engine; see :meth:`attach`.

    Attributes
    ----------
    steps : deque of StepRecord
        The last 512.
    num_steps : int
        Steps recorded since training began.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine = engine
        self.steps: collections.deque[StepRecord] = collections.deque(maxlen=_KEPT_STEPS)
        self._current: StepRecord | None = None
        self.num_steps = 0
        self._clock = _CudaClock() if engine.device.type == "cuda" else _HostClock()
        self._pending: list[tuple[str, int, Any, Any]] = []
        self._counts: collections.Counter[str] = collections.Counter()

    @classmethod
    def attach(cls, engine: PipelineEngine) -> Telemetry:
        """Start recording every instruction that ``engine`` executes."""
        telemetry = cls(engine)
        wrapped = {
            instruction: telemetry._wrap(instruction.__name__, function)
            for instruction, function in compat.instruction_map(type(engine)).items()
        }
        setattr(engine, compat.INSTRUCTION_MAP_ATTRIBUTE, wrapped)
        return telemetry

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record one optimizer step."""
        self.num_steps += 1
        self._current = StepRecord(start_s=time.perf_counter(), number=self.num_steps)
        self._pending.clear()
        self._counts.clear()
        self._clock.begin()
        try:
            yield
        except BaseException:
            self._current = None
            raise
        record, self._current = self._current, None
        record.instructions = [
            InstructionRecord(
                name,
                index,
                self._clock.seconds(start),
                self._clock.seconds(stop) - self._clock.seconds(start),
            )
            for name, index, start, stop in self._pending
        ]
        record.duration_s = time.perf_counter() - record.start_s
        self.steps.append(record)

    def _wrap(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def timed(engine: PipelineEngine, *args: Any, **kwargs: Any) -> None:
            if self._current is None:
                function(engine, *args, **kwargs)
                return
            start = self._clock.now()
            function(engine, *args, **kwargs)
            self._pending.append((name, self._counts[name], start, self._clock.now()))
            self._counts[name] += 1

        return timed


class _HostClock:
    """Times on the host: right where a computation is finished when its call returns."""

    def begin(self) -> None:
        self._origin_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark - self._origin_s


class _CudaClock:
    """CUDA events, read once at the end of the step: no synchronisation in between."""

    def begin(self) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return float(self._origin.elapsed_time(mark)) / 1000.0


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """One step over all ranks.

    Attributes
    ----------
    step_time_s : float
        Longest over the ranks.
    makespan_s : float
        First forward to last backward.
    busy_s : dict of int to float
        Compute seconds per rank.
    bubble_fraction : float
        ``1 - busy / (ranks x makespan)``.
    stage_imbalance : float
        Over the ranks, the mean of (longest / mean) forward plus backward time of a microbatch.
    """

    step_time_s: float
    makespan_s: float
    busy_s: dict[int, float]
    bubble_fraction: float
    stage_imbalance: float


def gather_steps(telemetry: Telemetry) -> dict[int, list[StepRecord]]:
    """Records of all ranks, on every rank; a collective call."""
    own = json.dumps([dataclasses.asdict(step) for step in telemetry.steps]).encode()
    gathered = {}
    for rank in range(dist.get_world_size()):
        payload = distributed.broadcast_bytes(own if rank == dist.get_rank() else None, src=rank)
        gathered[rank] = [
            StepRecord(**{**step, "instructions": [InstructionRecord(**r) for r in step["instructions"]]})
            for step in json.loads(payload)
        ]
    return gathered


def summarise(steps: dict[int, StepRecord]) -> StepSummary:
    """Reduce one step's records (by rank) to figures; ranks must share one machine's clock."""
    busy_s = {rank: sum(r.duration_s for r in step.compute()) for rank, step in steps.items()}
    starts = [step.start_s + r.start_s for step in steps.values() for r in step.compute()]
    stops = [step.start_s + r.start_s + r.duration_s for step in steps.values() for r in step.compute()]
    makespan_s = max(stops) - min(starts)
    return StepSummary(
        step_time_s=max(step.duration_s for step in steps.values()),
        makespan_s=makespan_s,
        busy_s=busy_s,
        bubble_fraction=1.0 - sum(busy_s.values()) / (len(steps) * makespan_s),
        stage_imbalance=float(np.mean([_imbalance(step) for step in steps.values()])),
    )


def _imbalance(step: StepRecord) -> float:
    """Longest over mean time of a microbatch on one rank."""
    times: collections.defaultdict[int, float] = collections.defaultdict(float)
    for record in step.compute():
        times[record.microbatch] += record.duration_s
    return max(times.values()) / float(np.mean(list(times.values())))


def trace_events(
    steps: dict[int, StepRecord], stage_of: Callable[[int], int], replica_of: Callable[[int], int]
) -> list[TraceEvent]:
    """One step's records as trace events; the earliest start is time zero."""
    origin_s = min(step.start_s for step in steps.values())
    return [
        TraceEvent(
            name=record.name,
            stage=stage_of(rank),
            replica=replica_of(rank),
            microbatch=record.microbatch,
            start_s=step.start_s - origin_s + record.start_s,
            duration_s=record.duration_s,
            args={},
        )
        for rank, step in steps.items()
        for record in step.instructions
    ]
