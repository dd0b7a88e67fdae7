import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from dflop_ds.errors import DataError, InfeasibleError, SchedulingError
from dflop_ds.scheduling import service as service_module
from dflop_ds.scheduling.service import PlanService

AMPLE_S = 60.0
"""Nothing takes so long, however busy the machine is."""


def _fallback(step):
    return f"fallback {step}"


def test_plans_come_from_the_background_in_order():
    threads = set()

    def plan(step):
        threads.add(threading.current_thread())
        return f"plan {step}"

    with PlanService(plan, _fallback, lookahead=2, deadline_s=AMPLE_S) as service:
        results = [service.get(step) for step in range(5)]
    assert [result.value for result in results] == [f"plan {step}" for step in range(5)]
    assert all(result.fallback_reason is None for result in results)
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_it_plans_ahead_but_no_further_than_the_lookahead():
    planned, ready = [], threading.Event()

    def plan(step):
        planned.append(step)
        if step == 13:
            ready.set()
        return step

    with PlanService(plan, _fallback, lookahead=2, deadline_s=AMPLE_S, first_step=10) as service:
        assert service.get(11).value == 11
        assert ready.wait(AMPLE_S)
        time.sleep(0.05)
        assert planned[-1] == 13
        assert planned == sorted(set(planned))


def test_a_late_plan_is_replaced_and_its_result_discarded():
    release = threading.Event()

    def plan(step):
        if step == 0:
            release.wait(AMPLE_S)
        return f"plan {step}"

    with PlanService(plan, _fallback, lookahead=1, deadline_s=0.05) as service:
        started_s = time.perf_counter()
        late = service.get(0)
        assert late.value == "fallback 0"
        assert "not ready within 0.05 s" in late.fallback_reason
        assert time.perf_counter() - started_s >= 0.05
        release.set()
        service._deadline_s = AMPLE_S
        assert service.get(1).value == "plan 1"
        assert service.background_s >= 0.05


@pytest.mark.parametrize(
    "error", [InfeasibleError("too big", 4), DataError("broken", "a"), ValueError("bug"), SystemExit(3)]
)
def test_a_failed_plan_is_replaced_in_the_callers_thread(error):
    callers = []

    def plan(step):
        if step == 0:
            raise error
        return "plan"

    def fallback(step):
        callers.append(threading.current_thread())
        return "fallback"

    with PlanService(plan, fallback, deadline_s=AMPLE_S) as service:
        result = service.get(0)
        assert result.value == "fallback"
        assert type(error).__name__ in result.fallback_reason
        assert callers == [threading.current_thread()]
        assert service.get(1).value == "plan"


def test_what_the_fallback_raises_reaches_the_caller():
    def fail(step):
        raise InfeasibleError("no bins", 9)

    with (
        PlanService(fail, fail, deadline_s=AMPLE_S) as service,
        pytest.raises(InfeasibleError, match="no bins"),
    ):
        service.get(0)


def test_a_value_of_none_is_a_plan():
    with PlanService(lambda step: None, _fallback, deadline_s=AMPLE_S) as service:
        assert service.get(0).fallback_reason is None


def test_misuse_is_refused():
    with PlanService(lambda step: step, _fallback, deadline_s=AMPLE_S) as service:
        service.get(3)
        with pytest.raises(SchedulingError, match="found step 3 after 3"):
            service.get(3)
    with pytest.raises(SchedulingError, match="closed"):
        service.get(4)
    for options in (
        {"lookahead": -1},
        {"deadline_s": -1.0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
    ):
        with pytest.raises(SchedulingError, match="finite and not negative"):
            PlanService(lambda step: step, _fallback, **options)


def test_close_is_idempotent_and_does_not_wait_for_a_stuck_plan(monkeypatch):
    monkeypatch.setattr(service_module, "_CLOSE_WAIT_S", 0.05)
    release = threading.Event()
    service = PlanService(lambda step: release.wait(AMPLE_S), _fallback, deadline_s=0.01)
    service.get(0)
    started_s = time.perf_counter()
    service.close()
    service.close()
    assert time.perf_counter() - started_s < AMPLE_S / 2
    release.set()


def test_a_forgotten_service_ends_its_thread():
    before = {thread for thread in threading.enumerate() if thread.name == "dflop-plan"}
    service = PlanService(lambda step: step, _fallback, deadline_s=AMPLE_S)
    service.get(0)
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "dflop-plan"} - before
    gone = weakref.ref(service)
    del service
    gc.collect()
    thread.join(AMPLE_S)
    assert gone() is None
    assert not thread.is_alive()


_EXIT_WITH_A_RUNNING_SOLVER = """
import numpy as np
from dflop_ds.scheduling.neighbourhood import improve
from dflop_ds.scheduling.blind import solve_blind
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.service import PlanService
problem = Problem(np.exp(np.random.default_rng(0).normal(0, 0.5, (64, 2))), 1, 16)
def plan(step):
    while True:  # a solve that reaches its bound ends early
        improve(problem, solve_blind(problem), deterministic_time_s=100.0)
service = PlanService(plan, lambda step: None, deadline_s=0.3)
assert service.get(0).fallback_reason
ENDING
"""


@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("raise KeyboardInterrupt", -2)])
def test_the_interpreter_exits_while_a_plan_is_being_made(ending, code):
    script = _EXIT_WITH_A_RUNNING_SOLVER.replace("ENDING", ending)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * AMPLE_S, check=False
    )
    assert done.returncode == code, done.stderr
