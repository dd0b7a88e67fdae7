"""A solver in a process of its own, replaced when it crashes or hangs."""

from __future__ import annotations

import functools
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from typing import IO

from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling import transport
from dflop_ds.scheduling.planner import PlannedStep, StepPlanner

logger = logging.getLogger(__name__)

WORKER = ("-m", "dflop_ds.scheduling.worker")

_MAX_FAILURES = 3
_END_WAIT_S = 1.0
_READ_BYTES = 1 << 16

_starting = threading.Lock()


@functools.cache
def _keep_forks_out() -> None:
    """Let no fork of this process fall into the start of a solver; once per process.

    The child, a data worker say, would inherit the pipe on whose end ``subprocess`` waits: the start would
    last as long as the child.
    """
    os.register_at_fork(
        before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release
    )


class _Broken(Exception):
    """The process gave no usable answer."""


class _Handle:
    """The running process, if any. It does not know the solver, so a forgotten solver can be collected."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.closed = False
        self.lock = threading.Lock()

    def end(self) -> None:
        """End the process now."""
        with self.lock:
            process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass
        try:
            process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.debug("the killed solver process %d has not ended yet", process.pid)

    def close(self) -> None:
        """End the process and start no other."""
        self.closed = True
        self.end()


class SolverProcess:
    """Runs `planner.plan` in another process; to be called from one thread.

    The process is started when first needed, without a copy of this process's memory, and does not get the
    terminal's Ctrl-C. It ends with :meth:`close`, with this process, and when this object is forgotten. After
    three failures in a row the plans are made in the calling thread instead.

    Parameters
    ----------
    planner : StepPlanner
    hang_after_s : float
        A process that has not answered after so many seconds is replaced.
    command : tuple of str
        Arguments of the Python interpreter.

    Raises
    ------
    SchedulingError
        If `hang_after_s` is not positive.
    """

    def __init__(
        self, planner: StepPlanner, *, hang_after_s: float = 60.0, command: tuple[str, ...] = WORKER
    ) -> None:
        if not hang_after_s > 0:
            raise SchedulingError(f"hang_after_s must be positive, found {hang_after_s}. Correct it.")
        self._planner = planner
        self._hang_after_s = hang_after_s
        self._command = command
        self._handle = _Handle()
        self._finalizer = weakref.finalize(self, self._handle.close)
        self.num_failures = 0
        self.num_started = 0
        self._failures_in_a_row = 0
        self._has_planner = False

    @property
    def pid(self) -> int | None:
        """Process id, or None where none runs."""
        process = self._handle.process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process now, in the calling thread, before the first plan is asked for.

        A process that is forked by one thread while another starts a program keeps a pipe of that start
        open, for which the other thread then waits: start before data workers are forked.
        """
        try:
            self._start()
        except OSError as error:
            logger.warning("the solver process could not be started yet: %s", error)

    def plan(self, step: int) -> PlannedStep:
        """Plan of a step.

        Raises
        ------
        SchedulingError
            If the process crashed or hung, which the next call repairs, or reported an error.
        """
        if self._failures_in_a_row >= _MAX_FAILURES:
            return self._planner.plan(step)
        try:
            answer = self._ask(transport.pack({"step": step}, {}))
        except (_Broken, OSError, ValueError) as error:
            self._handle.end()
            if not self._handle.closed:
                self._count_failure(error)
            raise SchedulingError(f"the solver process failed: {error}. It is replaced.") from error
        self._failures_in_a_row = 0
        return transport.unpack_planned(answer, self._planner.order)

    def close(self) -> None:
        """End the process; may be called again, and from another thread."""
        self._finalizer()

    def _count_failure(self, error: Exception) -> None:
        self.num_failures += 1
        self._failures_in_a_row += 1
        logger.warning("the solver process failed (%s) and is replaced; LPT plans meanwhile", error)
        if self._failures_in_a_row >= _MAX_FAILURES:
            logger.warning("it failed %d times in a row: a thread plans from now on", _MAX_FAILURES)

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        _keep_forks_out()
        with self._handle.lock, _starting:
            if self._handle.closed:
                raise _Broken("it is closed")
            process = self._handle.process = subprocess.Popen(
                [sys.executable, *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.num_started += 1
        self._has_planner = False
        return process

    def _ask(self, request: bytes) -> bytes:
        process, frames = self._handle.process, [request]
        if process is None:
            process = self._start()
        if not self._has_planner:
            frames.insert(0, transport.pack_planner(self._planner))
        if process.stdin is None or process.stdout is None:
            raise _Broken("it has no pipes")
        end_s = time.monotonic() + self._hang_after_s
        # A process that does not read would block the writer for ever: then it is ended from outside.
        watchdog = threading.Timer(self._hang_after_s, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            for frame in frames:
                transport.write_frame(process.stdin, frame)
        finally:
            watchdog.cancel()
        self._has_planner = True
        return _Reader(process.stdout, end_s).frame()


class _Reader:
    """Reads one frame from a pipe before a time."""

    def __init__(self, pipe: IO[bytes], end_s: float) -> None:
        self._descriptor = pipe.fileno()
        self._end_s = end_s

    def frame(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(transport.LENGTH_BYTES), "little"))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            left_s = self._end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._descriptor], [], [], left_s)[0]:
                raise _Broken("it did not answer in time")
            chunk = os.read(self._descriptor, min(_READ_BYTES, count - len(data)))
            if not chunk:
                raise _Broken("it ended unexpectedly")
            data += chunk
        return bytes(data)
