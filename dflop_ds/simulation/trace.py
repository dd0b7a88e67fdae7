"""Chrome / Perfetto trace files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.step import StepResult

SCHEMA_VERSION = 1

_MICROSECONDS = 1e6


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """One bar of a trace.

    Attributes
    ----------
    name : str
    stage, replica : int
        Row and group of rows.
    microbatch : int
    start_s, duration_s : float
        Seconds from the start of the trace.
    args : mapping of str to JSON values
        Shown when the bar is selected.
    source : str
        Where the times are from, such as "predicted"; bars of another source have rows of their own.
    """

    name: str
    stage: int
    replica: int
    microbatch: int
    start_s: float
    duration_s: float
    args: Mapping[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)
    source: str = ""


def step_events(result: StepResult, *, case: int = 0, source: str = "predicted") -> list[TraceEvent]:
    """Events of one simulated step; stages are counted over all modules."""
    events = []
    for module, first_stage in zip(result.modules, result.grid.first_stages, strict=False):
        for name, starts_s, ends_s in (
            ("forward", module.forward_start_s[case], module.forward_end_s[case]),
            ("backward", module.backward_start_s[case], module.backward_end_s[case]),
        ):
            for (replica, stage, microbatch), start_s in np.ndenumerate(starts_s):
                duration_s = float(ends_s[replica, stage, microbatch] - start_s)
                place = (first_stage + stage, replica, microbatch)
                bar = f"{name} {microbatch}"
                events.append(TraceEvent(bar, *place, float(start_s), duration_s, source=source))
    return events


def write_trace(path: str | Path, events: Iterable[TraceEvent], *, title: str) -> None:
    """Write a trace that Perfetto and chrome://tracing open.

    Each replica of each source is a process and each of its stages a thread, with names.

    Parameters
    ----------
    path : str or Path
    events : iterable of TraceEvent
    title : str
        Kept in the file; say there whether the times are simulated, emulated or measured.

    Raises
    ------
    SchedulingError
        If a time is NaN, infinite or negative, or an arg is not a JSON value. Nothing is written then.
    """
    bars = list(events)
    for event in bars:
        if not (math.isfinite(event.start_s) and math.isfinite(event.duration_s) and event.duration_s >= 0):
            raise SchedulingError(
                f"trace times must be finite and durations not negative, found start {event.start_s} s "
                f"and duration {event.duration_s} s of event {event.name!r}. Correct the times."
            )
    processes = _process_ids(bars)
    document = {
        "traceEvents": _names(bars) + [_bar(event, processes) for event in bars],
        "displayTimeUnit": "ms",
        "otherData": {"schema_version": SCHEMA_VERSION, "title": title},
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SchedulingError(
            f"args of trace events must be JSON values; {error}. Convert them to plain numbers."
        ) from error
    Path(path).write_text(text, encoding="utf-8")


def _process_ids(events: list[TraceEvent]) -> dict[tuple[str, int], int]:
    """Process of each (source, replica): replicas in order, below them those of the next source."""
    sources = list(dict.fromkeys(event.source for event in events))
    stride = 1 + max((event.replica for event in events), default=0)
    return {
        (event.source, event.replica): sources.index(event.source) * stride + event.replica
        for event in events
    }


def _names(events: list[TraceEvent]) -> list[dict[str, object]]:
    names: list[dict[str, object]] = []
    for (source, replica), process in sorted(_process_ids(events).items(), key=lambda item: item[1]):
        title = f"{source} replica {replica}".strip()
        names.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        stages = {event.stage for event in events if (event.source, event.replica) == (source, replica)}
        for stage in sorted(stages):
            where: dict[str, object] = {"ph": "M", "pid": process, "tid": stage}
            names.append({**where, "name": "thread_name", "args": {"name": f"stage {stage}"}})
            names.append({**where, "name": "thread_sort_index", "args": {"sort_index": stage}})
    return names


def _bar(event: TraceEvent, process_ids: Mapping[tuple[str, int], int]) -> dict[str, object]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.name.split(" ", maxsplit=1)[0],
        "pid": process_ids[event.source, event.replica],
        "tid": event.stage,
        "ts": event.start_s * _MICROSECONDS,
        "dur": event.duration_s * _MICROSECONDS,
        "args": {"microbatch": event.microbatch, **event.args},
    }
