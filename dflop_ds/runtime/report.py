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
from dflop_ds.scheduling.planner import PlannedStep
from dflop_ds.simulation.trace import write_trace

logger = logging.getLogger(__name__)


def write_reports(engine: Any, config: DflopConfig) -> None:
    """Write the trace that ``dflop.telemetry`` asks for; a collective call where it does."""
    if getattr(engine, "telemetry", None) is not None and config.telemetry.trace is not None:
        write_step_trace(engine, Path(config.telemetry.trace), config.telemetry.trace_step)


def write_step_trace(engine: Any, path: Path, step: int | None = None) -> None:
    """Perfetto trace of one measured step; a collective call.

    Parameters
    ----------
    engine : PipelineEngine
        With ``telemetry`` attached.
    path : Path
    step : int, optional
        Counted from 1; the last one by default, or where the step is no longer remembered.
    """
    gathered = gather_steps(engine.telemetry)
    if dist.get_rank() != 0 or not gathered[0]:
        return
    known = [record.number for record in gathered[0]]
    if step is not None and step not in known:
        logger.warning(
            "step %d cannot be traced, steps %d to %d can; the last one is", step, known[0], known[-1]
        )
    index = known.index(step) if step in known else len(known) - 1
    topology = engine.module.topology()
    events = trace_events(
        {rank: steps[index] for rank, steps in gathered.items()},
        stage_of=lambda rank: topology.get_coord(rank).pipe,
        replica_of=lambda rank: topology.get_coord(rank).data,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(path, events, title=f"measured step {known[index]}")
    logger.info("wrote the trace of step %d to %s", known[index], path)


class PlanLog:
    """One JSON line per planned step: samples by bin and how the solver did.

    Parameters
    ----------
    path : Path
        Written anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")

    def append(self, planned: PlannedStep) -> None:
        """Add the plan of one step."""
        solution = dataclasses.asdict(planned.solution)
        solution.pop("assignment")
        line = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(planned.plan), "solution": solution}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
