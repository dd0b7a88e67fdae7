import heapq

import numpy as np
import pytest

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.pipeline import makespans_1f1b, simulate_1f1b


def _brute_force(forward_s, backward_s, send_s):
    """Event-queue simulation of textbook 1F1B: warm-up forwards, then one backward per forward."""
    num_stages, num_microbatches = forward_s.shape
    work = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        order = [("f", index) for index in range(warmup)]
        for index in range(num_microbatches - warmup):
            order += [("f", warmup + index), ("b", index)]
        order += [("b", index) for index in range(num_microbatches - warmup, num_microbatches)]
        work.append(order)
    ready = {("f", 0, index) for index in range(num_microbatches)}
    ready |= {("b", num_stages - 1, index) for index in range(num_microbatches)}
    busy, position, ends_s = [False] * num_stages, [0] * num_stages, {}
    events, now_s = [(0.0, 0, "tick", 0, 0)], 0.0
    serial = 1
    while events:
        now_s, _, what, stage, index = heapq.heappop(events)
        if what in ("end f", "end b"):
            kind = what[-1]
            busy[stage] = False
            ends_s[kind, stage, index] = now_s
            target = stage + (1 if kind == "f" else -1)
            if 0 <= target < num_stages:
                heapq.heappush(events, (now_s + send_s, serial, f"arrive {kind}", target, index))
                serial += 1
        elif what.startswith("arrive"):
            ready.add((what[-1], stage, index))
        for each in range(num_stages):
            if busy[each] or position[each] == len(work[each]):
                continue
            kind, index = work[each][position[each]]
            if (kind, each, index) in ready:
                busy[each] = True
                position[each] += 1
                duration_s = (forward_s if kind == "f" else backward_s)[each, index]
                heapq.heappush(events, (now_s + duration_s, serial, f"end {kind}", each, index))
                serial += 1
    return now_s, ends_s


@pytest.mark.parametrize("send_s", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 9), (7, 5)])
def test_equals_an_event_queue(shape, send_s):
    rng = np.random.default_rng(sum(shape))
    forward_s, backward_s = rng.exponential(1.0, shape), rng.exponential(2.0, shape)
    makespan_s, ends_s = _brute_force(forward_s, backward_s, send_s)
    result = simulate_1f1b(forward_s, backward_s, send_s=send_s)
    assert result.makespan_s == pytest.approx(makespan_s)
    for (kind, stage, index), end_s in ends_s.items():
        ends = result.forward_end_s if kind == "f" else result.backward_end_s
        assert ends[stage, index] == pytest.approx(end_s)
    assert len(ends_s) == 2 * forward_s.size
    np.testing.assert_allclose(result.forward_end_s - result.forward_start_s, forward_s)
    np.testing.assert_allclose(result.backward_end_s - result.backward_start_s, backward_s)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 4), (2, 4), (4, 8)])
def test_equal_microbatches_have_the_known_bubble(num_stages, num_microbatches):
    forward_s = np.ones((num_stages, num_microbatches))
    result = simulate_1f1b(forward_s, 2 * forward_s)
    assert result.makespan_s == pytest.approx(3 * (num_microbatches + num_stages - 1))
    assert result.bubble_fraction == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))
    np.testing.assert_allclose(result.busy_s, 3 * num_microbatches)


def test_many_cases_equal_single_ones():
    rng = np.random.default_rng(0)
    forward_s, backward_s = rng.exponential(1.0, (6, 3, 5)), rng.exponential(1.0, (6, 3, 5))
    expected_s = [
        simulate_1f1b(forward, backward, send_s=0.1).makespan_s
        for forward, backward in zip(forward_s, backward_s, strict=True)
    ]
    np.testing.assert_allclose(makespans_1f1b(forward_s, backward_s, send_s=0.1), expected_s)


def test_no_time_at_all():
    result = simulate_1f1b(np.zeros((2, 3)), np.zeros((2, 3)))
    assert (result.makespan_s, result.bubble_fraction) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "send_s", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), 0.0, "same shape"),
        (np.ones(3), np.ones(3), 0.0, "2 dimensions"),
        (np.ones((2, 0)), np.ones((2, 0)), 0.0, "at least 1 stage and 1 microbatch"),
        (np.full((2, 3), np.nan), np.ones((2, 3)), 0.0, "forward_s must be finite"),
        (np.ones((2, 3)), -np.ones((2, 3)), 0.0, "backward_s must be finite"),
        (np.ones((2, 3)), np.ones((2, 3)), -1.0, "send_s must be finite"),
    ],
)
def test_bad_times_are_refused(forward_s, backward_s, send_s, message):
    with pytest.raises(SchedulingError, match=message):
        simulate_1f1b(forward_s, backward_s, send_s=send_s)
