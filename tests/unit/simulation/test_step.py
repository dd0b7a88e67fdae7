"""Whole steps against a slow instruction-by-instruction simulation, and against small cases by hand."""

import numpy as np
import pytest

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.critical import critical_path
from dflop_ds.simulation.network import Link, ring_all_gather_s, ring_all_reduce_s, ring_link
from dflop_ds.simulation.pipeline import makespans_1f1b
from dflop_ds.simulation.schedule import Kind
from dflop_ds.simulation.step import simulate_steps
from dflop_ds.simulation.work import ModuleWork, Network, StepEnd
from tests.support.slow_pipeline import SlowStep


def _random_modules(rng, shapes, num_microbatches):
    return [
        (rng.exponential(1.0, (*shape, num_microbatches)), rng.exponential(2.0, (*shape, num_microbatches)))
        for shape in shapes
    ]


def _wires(sizes, bandwidths, lanes):
    """Seconds on every edge by (super-replica, lane, microbatch); at a border those of the busiest rank."""
    stages = [(module, stage) for module, size in enumerate(sizes) for stage in range(size.shape[1])]
    wires = []
    for edge, (module, stage) in enumerate(stages[:-1]):
        own = sizes[module][:, stage].reshape(-1, lanes[module], sizes[module].shape[-1])
        behind = stages[edge + 1][0]
        if behind != module and max(lanes[module], lanes[behind]) > 1:
            own = np.maximum(own.max(axis=1), own.sum(axis=1) / lanes[behind])[:, None]
        wires.append(own / bandwidths[edge])
    return wires


@pytest.mark.parametrize("sends", ["overlapped", "rendezvous"])
@pytest.mark.parametrize(
    ("shapes", "num_microbatches"),
    [
        ([(1, 1)], 3),
        ([(1, 4)], 1),
        ([(3, 4)], 6),
        ([(2, 3)], 2),
        ([(2, 1), (1, 2)], 4),  # two encoder replicas feed one LLM replica
        ([(2, 2), (6, 2)], 5),  # one encoder replica feeds three LLM replicas, in two super-replicas
        ([(4, 1), (6, 2)], 3),  # two encoder replicas with three LLM replicas
        ([(2, 1), (2, 3)], 4),
    ],
)
def test_equals_a_slow_simulation_of_every_instruction(shapes, num_microbatches, sends):
    rng = np.random.default_rng(len(shapes) + num_microbatches)
    modules = _random_modules(rng, shapes, num_microbatches)
    sizes = [rng.exponential(1.0, forward.shape) for forward, _ in modules]
    num_edges = sum(stages for _, stages in shapes) - 1
    links = [Link(*row) for row in rng.uniform(0.1, 2.0, (num_edges, 2)).tolist()]
    supers = int(np.gcd.reduce([replicas for replicas, _ in shapes]))
    wires = _wires(sizes, [link.bandwidth_bytes_per_s for link in links], [r // supers for r, _ in shapes])
    slow = SlowStep(modules, wires, [link.latency_s for link in links], sends == "rendezvous")
    works = [ModuleWork(f[None], b[None], size[None]) for (f, b), size in zip(modules, sizes, strict=True)]
    result = simulate_steps(works, network=Network(links, sends))
    assert result.makespan_s[0] == pytest.approx(slow.makespan_s)
    np.testing.assert_allclose(result.ready_s[0], slow.ready_s())
    assert result.step_time_s[0] == pytest.approx(slow.ready_s().max())
    for (kind, stage, replica, microbatch), (start_s, end_s) in slow.passes.items():
        module = slow.module(stage)
        found, name = result.modules[module], "forward" if kind is Kind.FORWARD_PASS else "backward"
        at = (0, replica, stage - slow.first[module], microbatch)
        assert getattr(found, f"{name}_start_s")[at] == pytest.approx(start_s)
        assert getattr(found, f"{name}_end_s")[at] == pytest.approx(end_s)
    path = critical_path(result)
    assert path.segments[0].start_s == 0.0
    assert path.segments[-1].end_s == pytest.approx(slow.ready_s().max())
    for before, after in zip(path.segments[:-1], path.segments[1:], strict=True):
        assert after.start_s == before.end_s
    for segment in path.segments:
        if segment.kind != "transfer":
            kind = Kind.FORWARD_PASS if segment.kind == "forward" else Kind.BACKWARD_PASS
            stage = segment.stage + slow.first[segment.module]
            expected = slow.passes[kind, stage, segment.replica, segment.microbatch]
            assert (segment.start_s, segment.end_s) == pytest.approx(expected)


def test_without_a_network_it_equals_the_pipeline_alone():
    rng = np.random.default_rng(1)
    forward_s, backward_s = rng.exponential(1.0, (2, 3, 4, 5, 6))
    result = simulate_steps(ModuleWork(forward_s, backward_s))
    flat_s = makespans_1f1b(forward_s.reshape(-1, 5, 6), backward_s.reshape(-1, 5, 6)).reshape(3, 4)
    np.testing.assert_allclose(result.makespan_s, flat_s.max(axis=1))
    np.testing.assert_allclose(result.step_time_s, result.makespan_s)


def test_two_stages_by_hand():
    # Stage 0: F0 0-1, F1 1-2. Stage 1: F0 1.5-2.5 (latency 0.5), B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5.
    # Stage 0: B0 from 5.0 to 7.0, B1 from 8.0 to 10.0.
    ones = np.ones((1, 1, 2, 2))
    result = simulate_steps(ModuleWork(ones, 2 * ones), network=Network(Link(0.5)))
    assert result.makespan_s[0] == pytest.approx(10.0)
    np.testing.assert_allclose(result.modules[0].busy_s, 6.0)
    np.testing.assert_allclose(result.modules[0].idle_s, 4.0)
    assert result.bubble_fraction[0] == pytest.approx(1 - 12 / 20)
    np.testing.assert_allclose(result.ready_s[0], [10.0, 7.5])


def test_rendezvous_holds_the_sender_by_hand():
    # Stage 0 (F 1 s) must deliver F1 while stage 1 (F 1 s, B 4 s) computes: it is held until 6.
    forward_s, backward_s = np.ones((1, 1, 2, 2)), np.array([[[[1.0, 1.0], [4.0, 4.0]]]])
    held = simulate_steps(ModuleWork(forward_s, backward_s), network=Network(sends="rendezvous"))
    # stage 1: F0 1-2, B0 2-6, F1 6-7, B1 7-11; stage 0: F1 1-2, takes B0's gradient at 6, B0 6-7, B1 11-12
    np.testing.assert_allclose(held.modules[0].backward_start_s[0, 0], [[6.0, 11.0], [2.0, 7.0]])
    assert held.makespan_s[0] == pytest.approx(12.0)


def test_the_end_of_a_step_by_hand():
    forward_s = np.array([1.0, 3.0]).reshape(1, 2, 1, 1) * np.ones((1, 2, 2, 1))
    work = ModuleWork(forward_s, forward_s)
    # Slow replica: F0 0-3, F1 3-6, B1 6-9, B0 9-12. Stage 1 reduces from 9, stage 0 from 12.
    end = StepEnd(reduce_s=[1.0, 5.0], optimizer_s=[4.0, 2.0], clips_gradients=True, fixed_s=0.25)
    clipped = simulate_steps(work, end=end)
    np.testing.assert_allclose(clipped.reduced_s[0], [13.0, 14.0])
    # The norm needs all gradients: stage 0 waits for stage 1.
    assert clipped.step_time_s[0] == pytest.approx(14.0 + 4.0 + 0.25)
    end = StepEnd(reduce_s=[3.0, 5.0], optimizer_s=[0.5, 0.1], clips_gradients=False)
    assert simulate_steps(work, end=end).step_time_s[0] == pytest.approx(15.5)
    path = critical_path(clipped)
    assert {segment.replica for segment in path.segments} == {1}
    assert path.replica_wait_s == {(0, 0): pytest.approx(6.0), (0, 1): 0.0}


def test_the_slow_microbatch_is_the_culprit():
    forward_s = np.ones((1, 2, 3, 6))
    forward_s[0, 1, :, 4] = 4.0
    path = critical_path(simulate_steps(ModuleWork(forward_s, 2 * forward_s)))
    worst = path.culprits[0]
    assert (worst.replica, worst.microbatch) == (1, 4)
    # In every stage and direction one pass of 12 takes 4 units and the mean is 1.25: 2.75 of 4 are excess.
    assert worst.excess_s == pytest.approx(2.75 / 4.0 * worst.on_path_s)
    assert worst.on_path_s > 0


def test_most_bytes_kept():
    bytes_kept = np.array([5.0, 1.0, 1.0, 7.0, 2.0])
    work = ModuleWork(np.ones((1, 1, 3, 5)), np.ones((1, 1, 3, 5)), activation_bytes=bytes_kept)
    peak = simulate_steps(work).modules[0].peak_activation_bytes
    # Stage 0 keeps up to three microbatches, the last stage one.
    np.testing.assert_array_equal(peak[0, 0], [10.0, 9.0, 7.0])


def test_modules_keep_as_many_microbatches_as_stages_follow():
    encoder = ModuleWork(np.ones((1, 2, 1, 4)), np.ones((1, 2, 1, 4)), activation_bytes=1.0)
    llm = ModuleWork(np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4)), activation_bytes=1.0)
    result = simulate_steps([encoder, llm])
    np.testing.assert_array_equal(result.modules[0].peak_activation_bytes, np.full((1, 2, 1), 3.0))
    np.testing.assert_array_equal(result.modules[1].peak_activation_bytes, [[[2.0, 1.0]]])


def test_collectives_by_hand():
    link = Link(0.5, 10.0)
    assert ring_all_reduce_s(100.0, 1, link) == 0.0
    # 4 ranks: 6 steps of 25 bytes each.
    assert ring_all_reduce_s(100.0, 4, link) == pytest.approx(6 * (0.5 + 2.5))
    np.testing.assert_allclose(ring_all_gather_s([100.0, 0.0], 4, link), [3 * 3.0, 1.5])
    fast, slow = Link(0.0, 100.0), Link(0.1, 20.0)
    assert ring_link(8, 8, fast, slow) == fast
    assert ring_link(16, 8, fast, slow, num_rings=4) == Link(0.1, 5.0)


_GOOD = np.ones((1, 2, 3, 4))
_SHORT = np.ones((1, 2, 3, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": []}, "at least one module"),
        ({"modules": ModuleWork(np.ones((2, 3)), np.ones((2, 3)))}, "same shape"),
        ({"modules": ModuleWork(_GOOD, -_GOOD)}, "backward_s must be finite"),
        ({"modules": ModuleWork(_GOOD, _GOOD, np.ones(3))}, "output_bytes must broadcast"),
        ({"modules": ModuleWork(_GOOD, _GOOD, None, -1.0)}, "activation_bytes must be finite"),
        ({"modules": [ModuleWork(_GOOD, _GOOD), ModuleWork(_SHORT, _SHORT)]}, "of microbatches"),
        ({"modules": ModuleWork(_GOOD, _GOOD), "network": Network([Link()])}, "one link for each of 2"),
        ({"modules": ModuleWork(_GOOD, _GOOD), "network": Network(sends="eager")}, "overlapped"),
        ({"modules": ModuleWork(_GOOD, _GOOD), "end": StepEnd(reduce_s=[1.0, 2.0])}, "reduce_s must"),
        ({"modules": ModuleWork(_GOOD, _GOOD), "end": StepEnd(fixed_s=np.nan)}, "fixed_s must be finite"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    modules = arguments.pop("modules")
    with pytest.raises(SchedulingError, match=message):
        simulate_steps(modules, **arguments)


def test_impossible_links_and_collectives_are_refused():
    for call in (
        lambda: Link(-1.0),
        lambda: Link(0.0, 0.0),
        lambda: ring_all_reduce_s(-1.0, 2, Link()),
        lambda: ring_all_reduce_s(1.0, 0, Link()),
    ):
        with pytest.raises(SchedulingError):
            call()
