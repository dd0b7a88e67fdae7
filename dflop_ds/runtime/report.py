"""What a run leaves behind: a trace of one step and the log of its plans."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from dflop_ds.config import DflopConfig
from dflop_ds.runtime.telemetry import gather_steps, trace_events
from dflop_ds.scheduling.plan import SCHEMA_VERSION
from dflop_ds.simulation.trace import write_trace

logger = logging.getLogger(__name__)


def write_reports(engine: Any, config: DflopConfig) -> None:
    """Write what ``dflop.telemetry`` asks for; a collective call where a trace is wanted."""
    telemetry = getattr(engine, "telemetry", None)
    if telemetry is None:
        return
    if config.telemetry.trace is not None and telemetry.steps:
        write_step_trace(engine, Path(config.telemetry.trace), config.telemetry.trace_step)
    if config.telemetry.plan_log is not None and dist.get_rank() == 0 and engine.feed is not None:
        write_plan_log(engine.feed.history, Path(config.telemetry.plan_log))


def write_step_trace(engine: Any, path: Path, step: int | None) -> None:
    """Perfetto trace of one measured step (counted from 1; the last one by default)."""
    gathered = gather_steps(engine.telemetry)
    if dist.get_rank() != 0:
        return
    index = len(gathered[0]) - 1 if step is None else min(step, len(gathered[0])) - 1
    topology = engine.module.topology()
    events = trace_events(
        {rank: steps[index] for rank, steps in gathered.items()},
        stage_of=lambda rank: topology.get_coord(rank).pipe,
        replica_of=lambda rank: topology.get_coord(rank).data,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(path, events, title=f"measured step {index + 1}")
    logger.info("wrote the trace of step %d to %s", index + 1, path)


def write_plan_log(history: dict[int, Any], path: Path) -> None:
    """One JSON line per planned step: samples by bin and how the solver did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for step in sorted(history):
            planned = history[step]
            solution = dataclasses.asdict(planned.solution)
            solution.pop("assignment")
            line = {
                "schema_version": SCHEMA_VERSION,
                **dataclasses.asdict(planned.plan),
                "solution": solution,
            }
            file.write(json.dumps(line) + "\n")
    logger.info("wrote %d plans to %s", len(history), path)
