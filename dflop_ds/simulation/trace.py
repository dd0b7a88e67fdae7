"""Chrome / Perfetto trace files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.pipeline import PipelineResult

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
    """

    name: str
    stage: int
    replica: int
    microbatch: int
    start_s: float
    duration_s: float
    args: Mapping[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)


def pipeline_events(result: PipelineResult, *, replica: int = 0) -> list[TraceEvent]:
    """Events of one simulated pipeline, by stage, then forwards before backwards."""
    events = []
    for stage in range(len(result.busy_s)):
        for name, start_s, end_s in (
            ("forward", result.forward_start_s[stage], result.forward_end_s[stage]),
            ("backward", result.backward_start_s[stage], result.backward_end_s[stage]),
        ):
            events += [
                TraceEvent(f"{name} {index}", stage, replica, index, float(start), float(end - start))
                for index, (start, end) in enumerate(zip(start_s, end_s, strict=True))
            ]
    return events


def write_trace(path: str | Path, events: Iterable[TraceEvent], *, title: str) -> None:
    """Write a trace that Perfetto and chrome://tracing open.

    Each replica is a process and each of its stages a thread, with names.

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
    document = {
        "traceEvents": _names(bars) + [_bar(event) for event in bars],
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


def _names(events: list[TraceEvent]) -> list[dict[str, object]]:
    names: list[dict[str, object]] = []
    for replica in sorted({event.replica for event in events}):
        names.append(
            {"ph": "M", "name": "process_name", "pid": replica, "args": {"name": f"replica {replica}"}}
        )
        for stage in sorted({event.stage for event in events if event.replica == replica}):
            where: dict[str, object] = {"ph": "M", "pid": replica, "tid": stage}
            names.append({**where, "name": "thread_name", "args": {"name": f"stage {stage}"}})
            names.append({**where, "name": "thread_sort_index", "args": {"sort_index": stage}})
    return names


def _bar(event: TraceEvent) -> dict[str, object]:
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.name.split(" ", maxsplit=1)[0],
        "pid": event.replica,
        "tid": event.stage,
        "ts": event.start_s * _MICROSECONDS,
        "dur": event.duration_s * _MICROSECONDS,
        "args": {"microbatch": event.microbatch, **event.args},
    }
