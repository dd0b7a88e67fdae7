"""Plans for a stream: windows of some global batches, each planned as a small data set of its own."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import DataError
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import PlannedStep, StepPlanner
from dflop_ds.shapes import SampleShape, ShapeTable

_MOST_DROPPED_WINDOWS = 100


class ShapeStream(Protocol):
    """Shapes of a stream's samples, in order."""

    def state(self) -> dict[str, Any]:
        """Position before the next sample, as JSON."""

    @property
    def pass_number(self) -> int:
        """Passes that have ended."""

    def next_shape(self, pass_number: int) -> tuple[int, SampleShape | None] | None:
        """Number and shape of the next sample (None: it is left out), or None when the pass has ended."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Some consecutive samples of the stream, and the plans of their steps.

    Attributes
    ----------
    number : int
    first_step : int
    state : dict
        Position of the stream before the window.
    planner : StepPlanner
        Its steps ``number * steps_per_epoch`` and following are those of the window, so that every window
        is shuffled anew.
    """

    number: int
    first_step: int
    state: dict[str, Any]
    planner: StepPlanner

    @property
    def num_steps(self) -> int:
        """Global batches of the window."""
        return self.planner.order.steps_per_epoch


class StreamPlanner:
    """Plans steps of a stream; what it plans depends on the stream, the seed and the settings alone.

    Windows have `order.num_samples` usable samples, and fewer at the end of a pass: no window holds samples
    of two passes. The samples of a window are shuffled as those of an epoch are. The planner reads the stream
    itself, in the order of the steps, from the thread that plans or from the one that waits for plans.

    Parameters
    ----------
    stream : ShapeStream
    order : EpochOrder
        Of a full window.
    make : callable
        Planner of a window from its shapes and their numbers.
    num_replicas, num_microbatches : int
        Of a full step.
    num_kept_steps : int
        How far behind the last planned step :meth:`state` may be asked for.
    """

    def __init__(
        self,
        stream: ShapeStream,
        order: EpochOrder,
        make: Callable[[ShapeTable, npt.NDArray[np.int64]], StepPlanner],
        num_replicas: int,
        num_microbatches: int,
        num_kept_steps: int,
    ) -> None:
        self.order = order
        self.table = ShapeTable.from_shapes([])
        self.rows = np.zeros(0, dtype=np.int64)
        self.names: dict[int, str] = {}
        self._stream = stream
        self._make = make
        self._num_replicas, self._num_microbatches = num_replicas, num_microbatches
        self._num_kept_steps = num_kept_steps
        self._lock = threading.Lock()
        self._windows: list[Window] = []
        self._next = (0, 0)

    def plan(self, step: int) -> PlannedStep:
        """Plan of optimizer step ``step``."""
        return self._planned(step, lambda planner, local: planner.plan(local))

    def fallback(self, step: int) -> PlannedStep:
        """Plan made without the solver."""
        return self._planned(step, lambda planner, local: planner.fallback(local))

    def fewest_microbatches(self, num_steps: int) -> int:
        """Microbatches that any ``num_steps`` consecutive steps have at least: a pass may end in each."""
        return num_steps * (1 if self.order.tail == "partial" else self._num_microbatches)

    def accepts(self, plan: StepPlan) -> bool:
        """Whether a plan that an earlier launch made fits the replicas and microbatches of this one.

        Its samples are not looked at: they are those of the stream, which was restored to them.
        """
        num_samples = sum(len(members) for members in plan.bins)
        micro_batch_size = self.order.batch_size // (self._num_replicas * self._num_microbatches)
        needed = math.ceil(num_samples / (self._num_replicas * max(1, micro_batch_size)))
        return plan.num_replicas == self._num_replicas and plan.num_microbatches >= min(
            self._num_microbatches, needed
        )

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint before ``step`` must hold, as JSON."""
        window = self._window_of(step)
        return {"number": window.number, "first_step": window.first_step, "records": window.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the window of :meth:`state`; the stream must have been restored to its beginning."""
        with self._lock:
            self._windows.clear()
            self.names.clear()
            self._next = (state["number"], state["first_step"])

    def _planned(self, step: int, plan: Callable[[StepPlanner, int], PlannedStep]) -> PlannedStep:
        window = self._window_of(step)
        local = window.number * window.num_steps + step - window.first_step
        found = plan(window.planner, local)
        return dataclasses.replace(
            found,
            plan=dataclasses.replace(found.plan, step=step, epoch=window.number),
            batch=dataclasses.replace(found.batch, step=step, epoch=window.number),
        )

    def _window_of(self, step: int) -> Window:
        with self._lock:
            while self._next[1] <= step:
                self._windows.append(self._read_window())
            while len(self._windows) > 1 and self._windows[1].first_step <= step - self._num_kept_steps:
                old = self._windows.pop(0)
                for number in old.planner.rows.tolist():
                    del self.names[number]
            found = [window for window in self._windows if window.first_step <= step]
            if not found:
                raise DataError(
                    f"step {step} of a stream must not be planned after step {self._windows[0].first_step}, "
                    "which has been; load a checkpoint to go back."
                )
            return found[-1]

    def _read_window(self) -> Window:
        """The next window with at least one step."""
        number, first_step = self._next
        fewest = self.order.batch_size if self.order.tail == "drop" else 1
        for _ in range(_MOST_DROPPED_WINDOWS):
            state = self._stream.state()
            shapes = self._read_shapes()
            if len(shapes) < fewest:
                continue
            rows = np.array(list(shapes), dtype=np.int64)
            window = Window(
                number, first_step, state, self._make(ShapeTable.from_shapes(shapes.values()), rows)
            )
            self._next = (number + 1, first_step + window.num_steps)
            self.names.update({row: shape.sample_id for row, shape in shapes.items()})
            return window
        raise DataError(
            f"a stream must hold usable samples, found none in {_MOST_DROPPED_WINDOWS} windows; "
            "the log has the reasons."
        )

    def _read_shapes(self) -> dict[int, SampleShape]:
        """Usable samples of one window by number; fewer where the pass ends."""
        shapes: dict[int, SampleShape] = {}
        pass_number = self._stream.pass_number
        for _ in range(_MOST_DROPPED_WINDOWS * self.order.num_samples):
            found = self._stream.next_shape(pass_number)
            if found is None:
                break
            if found[1] is not None:
                shapes[found[0]] = found[1]
            if len(shapes) == self.order.num_samples:
                break
        return shapes
