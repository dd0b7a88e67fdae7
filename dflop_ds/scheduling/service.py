"""Planning ahead of time in a background thread, which may itself ask another process."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from dflop_ds.errors import SchedulingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_WAIT_S = 5.0
_PATIENCE = 2


@dataclasses.dataclass(frozen=True)
class PlanResult(Generic[T]):
    """A plan and where it is from.

    Attributes
    ----------
    value : T
    fallback_reason : str or None
        Why `fallback_fn` made it; None if the background did.
    """

    value: T
    fallback_reason: str | None


@dataclasses.dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What the background made of one step: a value in a list of one, or an error."""

    value: list[T]
    error: BaseException | None


class _Worker(Generic[T]):
    """State shared with the thread. It does not know the service, so a forgotten service can be collected."""

    def __init__(self, plan_fn: Callable[[int], T], first_step: int, lookahead: int) -> None:
        self.changed = threading.Condition()
        self.outcomes: dict[int, _Outcome[T]] = {}
        self.background_s = 0.0
        self.closed = False
        self._plan_fn = plan_fn
        self._next_step = first_step
        self._horizon = first_step + lookahead
        self._oldest = first_step
        self._lookahead = lookahead
        self._thread = threading.Thread(target=self._run, name="dflop-plan", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self._next_step <= self._horizon)
                if self.closed:
                    return
                step = self._next_step
                self._next_step += 1
            started_s = time.perf_counter()
            try:
                outcome = _Outcome([self._plan_fn(step)], None)
            except BaseException as error:  # even SystemExit must not end the thread unseen
                outcome = _Outcome([], error)
            with self.changed:
                self.background_s += time.perf_counter() - started_s
                if step >= self._oldest and not self.closed:
                    self.outcomes[step] = outcome
                self.changed.notify_all()

    def take(self, step: int, deadline_s: float) -> _Outcome[T] | None:
        """Outcome of a step, or None when it did not come in time; older steps are discarded."""
        with self.changed:
            self._oldest = step
            self._next_step = max(self._next_step, step)
            self._horizon = step + self._lookahead
            for old in [key for key in self.outcomes if key < step]:
                del self.outcomes[old]
            self.changed.notify_all()
            self.changed.wait_for(lambda: step in self.outcomes or self.closed, timeout=deadline_s)
            self._oldest = step + 1
            outcome = self.outcomes.pop(step, None)
            if outcome is None:  # too late for this step, and perhaps for the next: catch up beyond them
                self._next_step = max(self._next_step, step + max(1, self._lookahead))
            return outcome

    def stop(self) -> None:
        """End the thread; one that is still computing is left behind, its result discarded."""
        with self.changed:
            self.closed = True
            self.outcomes.clear()
            self.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_CLOSE_WAIT_S)


class PlanService(Generic[T]):
    """Compute plans ahead of the steps that need them.

    One daemon thread runs `plan_fn` for the coming steps. A plan that is late or failed is replaced by
    `fallback_fn` in the caller's thread, so training waits at most `deadline_s` plus the fallback. After
    two late plans in a row nobody waits any more until a plan is ready in time again.

    Parameters
    ----------
    plan_fn : callable of int
        Pure function of the step.
    fallback_fn : callable of int
        Cheap replacement; what it raises reaches the caller.
    lookahead : int
        Steps to plan beyond the one last asked for.
    deadline_s : float
        Longest wait for the background, seconds.
    first_step : int
        Step at which planning starts, before any is asked for.
    startup_s : float
        Longer wait for the first plan, seconds: training has not begun, and a process may have to start.

    Raises
    ------
    SchedulingError
        If `lookahead` or `deadline_s` is negative.
    """

    def __init__(
        self,
        plan_fn: Callable[[int], T],
        fallback_fn: Callable[[int], T],
        lookahead: int = 2,
        deadline_s: float = 1.0,
        *,
        first_step: int = 0,
        startup_s: float = 0.0,
    ) -> None:
        if lookahead < 0 or not 0 <= deadline_s <= threading.TIMEOUT_MAX - startup_s:
            raise SchedulingError(
                f"lookahead and deadline_s must be finite and not negative, found {lookahead} and "
                f"{deadline_s}. Correct the configuration."
            )
        self._fallback_fn = fallback_fn
        self._deadline_s = deadline_s
        self._startup_s = startup_s
        self._num_late = 0
        self._last_step = first_step - 1
        self._worker: _Worker[T] = _Worker(plan_fn, first_step, lookahead)
        # Runs at most once: on close, when the service is forgotten, or at interpreter exit.
        self._finalizer = weakref.finalize(self, self._worker.stop)

    def get(self, step: int) -> PlanResult[T]:
        """Plan of a step.

        Parameters
        ----------
        step : int
            Larger than every step asked for before; steps may be skipped.

        Raises
        ------
        SchedulingError
            If the steps do not increase or the service is closed.
        Exception
            Whatever `fallback_fn` raises.
        """
        if self._worker.closed:
            raise SchedulingError(
                "plans can only be taken from an open service, found a closed one. Build a new one."
            )
        if step <= self._last_step:
            raise SchedulingError(
                f"steps must increase, found step {step} after {self._last_step}. "
                "Build a new service to go back."
            )
        self._last_step = step
        deadline_s = 0.0 if self._num_late >= _PATIENCE else self._deadline_s + self._startup_s
        self._startup_s = 0.0
        outcome = self._worker.take(step, deadline_s)
        self._num_late = self._num_late + 1 if outcome is None else 0
        reason: str | None = None
        if outcome is None:
            reason = f"the plan was not ready within {deadline_s} s"
        elif outcome.error is not None:
            reason = f"planning raised {type(outcome.error).__name__}: {outcome.error}"
        if outcome is not None and outcome.error is None:
            value = outcome.value[0]
        else:
            logger.info("step %d uses the fallback plan: %s", step, reason)
            value = self._fallback_fn(step)
        return PlanResult(value, reason)

    @property
    def background_s(self) -> float:
        """Seconds that the background thread computed, for discarded plans too."""
        return self._worker.background_s

    def close(self) -> None:
        """Stop planning; may be called again. Waits at most 5 s for a plan in the making."""
        self._finalizer()

    def __enter__(self) -> PlanService[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()
