"""The solver process: same plans, replaced after a crash or a hang, gone with its owner."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dflop_ds.cost.model import SampleCosts
from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling import transport
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.scheduling.process import SolverProcess
from dflop_ds.scheduling.service import PlanService
from dflop_ds.shapes import SampleShape, ShapeTable

# Takes the planner and a request, then does what a broken solver does.
_CRASH = ("-c", "import sys; sys.stdin.buffer.read(8); sys.exit(3)")
_HANG = ("-c", "import time; time.sleep(600)")

AMPLE_S = 60.0
"""Nothing takes so long, however busy the machine is."""


def _planner(**options) -> StepPlanner:
    tokens = np.random.default_rng(0).integers(10, 1000, 48)
    table = ShapeTable.from_shapes(
        SampleShape(f"id-{i}", 1, 0, int(t), int(t), 1) for i, t in enumerate(tokens)
    )
    times_s = 1e-3 * np.stack([tokens, 2.0 * tokens], axis=1)
    values = {
        "table": table,
        "rows": np.arange(48) + 100,
        "order": EpochOrder(48, 16, seed=1),
        "num_replicas": 2,
        "num_microbatches": 4,
        "micro_batch_size": 2,
        "costs": SampleCosts(times_s, 2 * times_s),
        "max_tokens": "auto",
        "deterministic_time_s": 0.01,
    }
    return StepPlanner(**(values | options))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pid: int) -> bool:
    end_s = time.monotonic() + AMPLE_S
    while _is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.05)
    return not _is_running(pid)


def test_the_process_makes_the_plans_of_the_planner():
    planner = _planner()
    solver = SolverProcess(planner)
    try:
        for step in (0, 1, 4):
            found, expected = solver.plan(step), planner.plan(step)
            assert found.plan == expected.plan
            assert found.makespan_s == expected.makespan_s
            assert found.bin_costs_s == expected.bin_costs_s
            assert found.solution.assignment == expected.solution.assignment
            np.testing.assert_array_equal(found.batch.positions, expected.batch.positions)
        assert solver.num_started == 1
        pid = solver.pid
    finally:
        solver.close()
        solver.close()
    assert _wait_until_gone(pid)
    with pytest.raises(SchedulingError, match="closed"):
        solver.plan(5)
    assert solver.num_failures == 0


def test_a_killed_process_is_replaced():
    solver = SolverProcess(_planner())
    solver.plan(0)
    os.kill(solver.pid, signal.SIGKILL)
    with pytest.raises(SchedulingError, match="It is replaced"):
        solver.plan(1)
    assert solver.plan(2).plan == _planner().plan(2).plan
    assert (solver.num_started, solver.num_failures) == (2, 1)
    solver.close()


@pytest.mark.parametrize(("command", "reason"), [(_CRASH, "failed"), (_HANG, "in time")])
def test_after_three_failures_the_thread_plans(command, reason):
    solver = SolverProcess(_planner(), hang_after_s=0.5, command=command)
    for step in range(3):
        with pytest.raises(SchedulingError, match=reason):
            solver.plan(step)
        assert solver.pid is None
    assert solver.plan(3).plan == _planner().plan(3).plan
    assert solver.num_started == 3
    solver.close()


def test_a_planner_error_is_not_a_failure_of_the_process():
    solver = SolverProcess(_planner(costs=None))
    with pytest.raises(SchedulingError, match="needs predicted costs"):
        solver.plan(0)
    assert (solver.num_failures, solver.num_started) == (0, 1)
    solver.close()


def test_training_goes_on_while_the_process_crashes():
    planner = _planner()
    solver = SolverProcess(planner, hang_after_s=AMPLE_S, command=_CRASH)
    with PlanService(solver.plan, planner.fallback, deadline_s=AMPLE_S) as service:
        results = [service.get(step) for step in range(6)]
    solver.close()
    assert sum(result.fallback_reason is not None for result in results) == 3
    assert [result.value.plan.step for result in results] == list(range(6))
    assert results[5].value.plan == planner.plan(5).plan


def test_a_forgotten_solver_ends_its_process():
    solver = SolverProcess(_planner())
    solver.plan(0)
    pid = solver.pid
    del solver
    gc.collect()
    assert _wait_until_gone(pid)


@pytest.mark.parametrize("ending", ["pass", "raise KeyboardInterrupt", "import os; os.kill(os.getpid(), 9)"])
def test_the_process_ends_with_its_parent(ending, tmp_path):
    script = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_process import _planner
from dflop_ds.scheduling.process import SolverProcess
solver = SolverProcess(_planner())
solver.plan(0)
print(solver.pid, flush=True)
{ending}
"""
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * AMPLE_S)
    assert _wait_until_gone(int(found.stdout.split()[0])), found.stderr


def test_the_process_needs_no_torch():
    code = "import dflop_ds.scheduling.worker, sys; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=2 * AMPLE_S)


def test_damaged_messages_are_refused():
    with pytest.raises(SchedulingError, match="readable"):
        transport.unpack(b"PK nonsense")
    with pytest.raises(SchedulingError, match="readable"):
        transport.unpack(transport.pack({"a": 1}, {"x": np.arange(4)})[:-9])


def test_after_two_late_plans_nobody_waits():
    release = threading.Event()

    def plan(step):
        release.wait(AMPLE_S)
        return f"plan {step}"

    with PlanService(plan, lambda step: f"fallback {step}", lookahead=2, deadline_s=0.1) as service:
        waited = [service.get(step).fallback_reason for step in range(4)]
        assert waited == [f"the plan was not ready within {time_s} s" for time_s in (0.1, 0.1, 0.0, 0.0)]
        release.set()
        # Without waiting, a plan is taken as soon as one is there.
        end_s = time.perf_counter() + AMPLE_S
        results = []
        for step in range(4, 1000):
            results.append(service.get(step))
            if results[-1].fallback_reason is None or time.perf_counter() > end_s:
                break
            time.sleep(0.05)
        assert results[-1].value == f"plan {3 + len(results)}"


def test_a_process_that_was_started_early_gets_the_planner_with_the_first_request() -> None:
    planner = _planner()
    solver = SolverProcess(planner)
    solver.start()
    pid = solver.pid
    assert pid is not None
    for step in (0, 1):
        assert solver.plan(step).plan == planner.plan(step).plan
    assert (solver.pid, solver.num_started, solver.num_failures) == (pid, 1, 0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SchedulingError, match="replaced"):
        solver.plan(2)
    assert solver.plan(2).plan == planner.plan(2).plan
    assert solver.num_started == 2
    solver.close()


def test_a_fork_meanwhile_does_not_stop_it_from_starting() -> None:
    # As a resumed run forks its data workers while the solver starts: they must not keep the pipe that
    # tells that it has started.
    def start_again_and_again() -> None:
        for _ in range(4):
            with contextlib.closing(SolverProcess(_planner(), command=_CRASH)) as solver:
                for _ in range(3):
                    with contextlib.suppress(SchedulingError):
                        solver.plan(0)

    starting = threading.Thread(target=start_again_and_again)
    starting.start()
    forked = []
    try:
        while starting.is_alive() and len(forked) < 200:
            pid = os.fork()
            if pid == 0:
                time.sleep(10 * AMPLE_S)
                os._exit(0)
            forked.append(pid)
        starting.join(AMPLE_S)
        assert not starting.is_alive()
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        starting.join()
