"""The plan log: JSONL of what was planned and measured, and its audit."""

from __future__ import annotations

import collections
import dataclasses
import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop_ds.errors import PlanError
from dflop_ds.scheduling.plan import SCHEMA_VERSION as PLAN_VERSION
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import PlannedStep

SCHEMA_VERSION = 2

_PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(StepPlan))


def plan_line(planned: PlannedStep, names: Mapping[int, str]) -> dict[str, Any]:
    """What is logged of a planned step.

    Parameters
    ----------
    planned : PlannedStep
    names : mapping of int to str
        Sample id of each data set index.
    """
    solution = dataclasses.asdict(planned.solution)
    solution.pop("assignment")
    return {
        "schema_version": SCHEMA_VERSION,
        "type": "plan",
        **{name: getattr(planned.plan, name) for name in _PLAN_FIELDS},
        "digest": int(planned.plan.encode()[0]),
        "sample_ids": [[names[index] for index in members] for members in planned.plan.bins],
        "bin_costs_s": list(planned.bin_costs_s),
        "makespan_s": planned.makespan_s,
        "blind_makespan_s": planned.blind_makespan_s,
        "kept_blind": planned.kept_blind,
        "limits": planned.limits,
        "solution": solution,
    }


def measured_line(
    step: int,
    *,
    stage: int,
    replica: int,
    step_time_s: float,
    microbatch_s: Sequence[float],
    passes: Sequence[tuple[str, int, float, float]] = (),
    start_s: float = 0.0,
    host: str = "",
) -> dict[str, Any]:
    """What is logged of a step that ran, as one rank measured it.

    Parameters
    ----------
    step : int
    stage, replica : int
        Place of the rank in the pipeline.
    step_time_s : float
    microbatch_s : sequence of float, length num_microbatches
        Forward plus backward seconds of each microbatch in this stage.
    passes : sequence of (instruction, microbatch, start_s, duration_s)
        Every forward and backward of this rank, from the start of the step.
    start_s : float
        Start of the step on the monotonic clock of the host.
    host : str
        Ranks of one host share its clock.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "type": "measured",
        "step": step,
        "stage": stage,
        "replica": replica,
        "step_time_s": step_time_s,
        "microbatch_s": list(microbatch_s),
        "passes": [list(each) for each in passes],
        "start_s": start_s,
        "host": host,
    }


@dataclasses.dataclass(frozen=True)
class LoggedStep:
    """A step as the log tells it.

    Attributes
    ----------
    plan : StepPlan
        Can be run again as it is.
    line : dict
        The whole plan line.
    measured : list of dict
        Lines of :func:`measured_line`.
    """

    plan: StepPlan
    line: dict[str, Any]
    measured: list[dict[str, Any]]


def rank_log(path: Path, rank: int) -> Path:
    """File in which a rank logs: `path` itself for rank 0, which logs the plans as well."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def rank_logs(path: Path) -> dict[int, Path]:
    """Logs of the ranks beside rank 0 that lie in the folder of its log, by rank."""
    found = {}
    for other in path.parent.glob(f"{glob.escape(path.stem)}.rank*{glob.escape(path.suffix)}"):
        number = other.name[len(path.stem) + len(".rank") : len(other.name) - len(path.suffix)]
        if number.isdigit():
            found[int(number)] = other
    return dict(sorted(found.items()))


def read_plan_log(path: str | Path) -> list[LoggedStep]:
    """Read a log, in the order in which the steps were planned, with what other ranks logged beside it.

    Raises
    ------
    PlanError
        If the file or a line is not readable, or its plan does not match its digest.
    """
    steps: dict[int, LoggedStep] = {}
    for file in (Path(path), *rank_logs(Path(path)).values()):
        _read_into(steps, file, planned=file == Path(path))
    return list(steps.values())


def _read_into(steps: dict[int, LoggedStep], path: Path, *, planned: bool) -> None:
    """Add the lines of one file; only that of rank 0 has plans."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"a plan log must be a readable file; {path}: {error}. Check the path.") from error
    for number, row in enumerate(text.splitlines(), start=1):
        try:
            line = json.loads(row)
            if line["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {line['schema_version']}, {SCHEMA_VERSION} is read")
            if line["type"] == "measured":
                if planned or line["step"] in steps:
                    steps[line["step"]].measured.append(line)
                continue
            steps[line["step"]] = LoggedStep(_plan_of(line), line, [])
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"every line of a plan log must be whole, line {number} of {path} is not: {error!r}. "
                "Remove a line that was cut off at the end; otherwise write the log again."
            ) from error


def _plan_of(line: Mapping[str, Any]) -> StepPlan:
    fields = {name: line[name] for name in _PLAN_FIELDS}
    fields["bins"] = tuple(tuple(int(index) for index in members) for members in line["bins"])
    plan = StepPlan(**fields)
    if int(plan.encode()[0]) != line["digest"]:
        raise ValueError(f"the plan of step {plan.step} does not match its digest (version {PLAN_VERSION})")
    return plan


@dataclasses.dataclass(frozen=True)
class Audit:
    """What :func:`audit` found.

    Attributes
    ----------
    num_steps, num_samples, num_fallbacks, num_kept_blind : int
    problems : tuple of str
        Empty if the log keeps every promise.
    predicted_s, measured_s : float
        Sums over the steps that were measured: predicted makespan, and the longest measured step.
    """

    num_steps: int
    num_samples: int
    num_fallbacks: int
    num_kept_blind: int
    problems: tuple[str, ...]
    predicted_s: float
    measured_s: float


def audit(steps: Iterable[LoggedStep]) -> Audit:
    """Check a log: each sample once per epoch, every cap kept, bins as many as announced."""
    rows = list(steps)
    problems: list[str] = []
    seen: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for step in rows:
        plan = step.plan
        seen[plan.epoch].update(index for members in plan.bins for index in members)
        for name, limit in step.line["limits"].items():
            most = max(limit["used"], default=0)
            if most > limit["cap"]:
                problems.append(f"step {plan.step}: a bin holds {most} {name}, the cap is {limit['cap']}")
        if [len(members) for members in plan.bins] != [len(ids) for ids in step.line["sample_ids"]]:
            problems.append(f"step {plan.step}: the sample ids do not match the bins")
    for epoch, counts in seen.items():
        twice = [index for index, count in counts.items() if count > 1]
        if twice:
            problems.append(f"epoch {epoch}: {len(twice)} samples occur twice, as sample {twice[0]}")
    timed = [step for step in rows if step.measured and step.line["makespan_s"] is not None]
    return Audit(
        num_steps=len(rows),
        num_samples=sum(sum(counts.values()) for counts in seen.values()),
        num_fallbacks=sum(step.line["solution"]["fallback_reason"] is not None for step in rows),
        num_kept_blind=sum(bool(step.line["kept_blind"]) for step in rows),
        problems=tuple(problems),
        predicted_s=sum(step.line["makespan_s"] for step in timed),
        measured_s=sum(max(line["step_time_s"] for line in step.measured) for step in timed),
    )
