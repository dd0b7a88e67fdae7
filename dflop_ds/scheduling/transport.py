"""Planners and plans as bytes without pickle: NPZ frames on pipes."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.model import SampleCosts
from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.assignment import Assignment, Solution
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import PlannedStep, StepPlanner
from dflop_ds.shapes import ShapeTable

Array = npt.NDArray[Any]

LENGTH_BYTES = 8
_OBJECTS = ("table", "rows", "order", "costs")


def pack(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """One message of JSON values and arrays."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(dict(fields)).encode(), dtype=np.uint8)
    np.savez(buffer, json=text, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read what :func:`pack` wrote.

    Raises
    ------
    SchedulingError
        If the message is damaged.
    """
    try:
        with np.load(io.BytesIO(message), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return json.loads(arrays.pop("json").tobytes()), arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SchedulingError(
            f"a message of the solver process must be readable, found {error!r}. "
            "This is a fault of dflop_ds, please report it."
        ) from error


def write_frame(file: IO[bytes], message: bytes) -> None:
    """Write the length and the message."""
    file.write(len(message).to_bytes(LENGTH_BYTES, "little"))
    file.write(message)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Read what :func:`write_frame` wrote; None at the end of the file."""
    head = file.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    message = file.read(int.from_bytes(head, "little"))
    return message if len(message) == int.from_bytes(head, "little") else None


def pack_planner(planner: StepPlanner) -> bytes:
    """A planner with its shapes and costs."""
    settings = {
        field.name: getattr(planner, field.name)
        for field in dataclasses.fields(planner)
        if field.name not in _OBJECTS
    }
    table = io.BytesIO()
    planner.table.write(table)
    arrays: dict[str, Array] = {
        "table": np.frombuffer(table.getvalue(), dtype=np.uint8),
        "rows": planner.rows,
    }
    if planner.costs is not None:
        arrays |= {"forward_s": planner.costs.forward_s, "backward_s": planner.costs.backward_s}
    return pack({"settings": settings, "order": dataclasses.asdict(planner.order)}, arrays)


def unpack_planner(message: bytes) -> StepPlanner:
    """Read what :func:`pack_planner` wrote."""
    fields, arrays = unpack(message)
    costs = SampleCosts(arrays["forward_s"], arrays["backward_s"]) if "forward_s" in arrays else None
    return StepPlanner(
        table=ShapeTable.read(io.BytesIO(arrays["table"].tobytes())),
        rows=arrays["rows"],
        order=EpochOrder(**fields["order"]),
        costs=costs,
        **fields["settings"],
    )


def pack_planned(planned: PlannedStep) -> bytes:
    """A planned step without its batch, which follows from the step."""
    fields = {
        field.name: getattr(planned, field.name)
        for field in dataclasses.fields(planned)
        if field.name not in ("plan", "batch", "solution")
    }
    solution = {
        field.name: getattr(planned.solution, field.name)
        for field in dataclasses.fields(planned.solution)
        if field.name != "assignment"
    }
    arrays: dict[str, Array] = {
        "plan": planned.plan.encode(),
        "bin_of": planned.solution.assignment.bin_of(),
    }
    num_bins = len(planned.solution.assignment.bins)
    return pack({"fields": fields, "solution": solution, "num_bins": num_bins}, arrays)


def unpack_planned(message: bytes, order: EpochOrder) -> PlannedStep:
    """Read what :func:`pack_planned` wrote.

    Raises
    ------
    SchedulingError
        If the message reports an error of the solver process, or is damaged.
    """
    content, arrays = unpack(message)
    if "error" in content:
        raise SchedulingError(f"the solver process reports {content['error']}")
    plan = StepPlan.decode(arrays["plan"])
    assignment = Assignment.from_bin_of(arrays["bin_of"], content["num_bins"])
    fields = content["fields"]
    fields["bin_costs_s"] = tuple(fields["bin_costs_s"])
    return PlannedStep(
        plan=plan,
        batch=order.batch(plan.step),
        solution=Solution(assignment=assignment, **content["solution"]),
        **fields,
    )
