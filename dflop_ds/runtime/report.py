"""What a run leaves behind: a trace of one step and the log of its plans."""

from __future__ import annotations

import collections
import json
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from dflop_ds.config import DflopConfig
from dflop_ds.runtime.telemetry import StepRecord, gather_steps, trace_events
from dflop_ds.scheduling.plan_log import measured_line, plan_line, rank_logs
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
    """One JSON line per planned step, and one per step that ran; see :mod:`dflop_ds.scheduling.plan_log`.

    Parameters
    ----------
    path : Path
        Written anew with the first line, unless :meth:`keep` was called before.
    names : mapping of int to str
        Sample id of each data set index.
    """

    def __init__(self, path: Path, names: Mapping[int, str]) -> None:
        self.path = path
        self._names = names
        self._keep: Callable[[dict[str, Any]], bool] | None = lambda line: False
        path.parent.mkdir(parents=True, exist_ok=True)

    def keep(self, num_planned: int, num_measured: int) -> None:
        """Go on with the log of a run that is resumed.

        Parameters
        ----------
        num_planned, num_measured : int
            Steps of which the plan, and the measurements, stay.
        """
        kept = {"plan": num_planned, "measured": num_measured}
        self._keep = lambda line: line["step"] < kept[line["type"]]

    def append(self, planned: PlannedStep) -> None:
        """Add the plan of one step."""
        self._write(plan_line(planned, self._names))

    def append_measured(self, step: int, record: StepRecord, *, stage: int, replica: int) -> None:
        """Add what this rank measured of one step."""
        times_s: collections.defaultdict[int, float] = collections.defaultdict(float)
        for instruction in record.compute():
            times_s[instruction.microbatch] += instruction.duration_s
        self._write(
            measured_line(
                step,
                stage=stage,
                replica=replica,
                step_time_s=record.duration_s,
                microbatch_s=[times_s[index] for index in sorted(times_s)],
                passes=[(r.name, r.microbatch, r.start_s, r.duration_s) for r in record.compute()],
                start_s=record.start_s,
                host=socket.gethostname(),
            )
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._keep is not None:
            rewrite_lines(self.path, self._keep)
            self._keep = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def open_rank_log(path: Path) -> PlanLog | None:
    """Log of a rank beside rank 0; None where it cannot be written, which does not stop training."""
    try:
        log = PlanLog(path, {})
        path.touch()
    except OSError as error:
        logger.warning("this rank keeps no log of its measurements: %s", error)
        return None
    return log


def forget_other_ranks(path: Path, world_size: int) -> None:
    """Remove the logs of ranks that an earlier run had and this one has not."""
    for rank, log in rank_logs(path).items():
        if rank >= world_size:
            log.unlink(missing_ok=True)


def rewrite_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Reduce a JSONL file to the lines that are whole and wanted; the file is never half written."""
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            if wanted(json.loads(text)):
                kept.append(text + "\n")
        except (ValueError, KeyError):  # cut off when the process was killed
            continue
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text("".join(kept), encoding="utf-8")
    unfinished.replace(path)
