"""What must hold of every simulated step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop_ds.simulation.critical import critical_path
from dflop_ds.simulation.network import Link
from dflop_ds.simulation.step import simulate_steps
from dflop_ds.simulation.work import ModuleWork, Network, StepEnd


@st.composite
def steps(draw):
    """Modules, network and end of a step."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    num_microbatches = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.integers(1, 3)), min_size=1, max_size=2))
    works = [
        # forward, backward and the bytes that are handed over
        ModuleWork(*rng.exponential(1.0, (3, 1, replicas, stages, num_microbatches)))
        for replicas, stages in shapes
    ]
    links = [Link(*rng.uniform(0.01, 1.0, 2)) for _ in range(sum(stages for _, stages in shapes) - 1)]
    return works, Network(links, draw(st.sampled_from(("overlapped", "rendezvous")))), StepEnd(0.3, 0.2)


@given(steps())
@settings(max_examples=60)
def test_no_step_beats_its_lower_bounds(step):
    works, network, end = step
    result = simulate_steps(works, network=network, end=end)
    makespan_s = result.makespan_s[0]
    links_s = sum(link.latency_s for link in network.links)
    for work, found in zip(works, result.modules, strict=True):
        assert makespan_s >= found.busy_s.max() - 1e-9
        assert (found.idle_s >= -1e-9).all()
        np.testing.assert_allclose(found.busy_s, (work.forward_s + work.backward_s).sum(axis=-1))
        # The passes of a rank do not overlap, and last as long as they should.
        starts_s = np.concatenate([found.forward_start_s, found.backward_start_s], axis=-1)
        ends_s = np.concatenate([found.forward_end_s, found.backward_end_s], axis=-1)
        order = np.argsort(starts_s, axis=-1, kind="stable")
        starts_s, ends_s = (np.take_along_axis(each, order, -1) for each in (starts_s, ends_s))
        assert (starts_s[..., 1:] >= ends_s[..., :-1] - 1e-9).all()
    # The first microbatch alone runs through all stages and back.
    fastest_s = sum((work.forward_s + work.backward_s)[0, :, :, 0].min(axis=0).sum() for work in works)
    assert makespan_s >= fastest_s + 2 * links_s - 1e-9
    assert 0.0 <= result.bubble_fraction[0] < 1.0
    assert result.step_time_s[0] >= makespan_s + 0.5 - 1e-9
    path = critical_path(result)
    assert sum(each.end_s - each.start_s for each in path.segments) <= result.step_time_s[0] + 1e-9


@given(steps(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_no_time_that_grows_shortens_a_step(step, seed):
    works, network, end = step
    rng = np.random.default_rng(seed)
    before = simulate_steps(works, network=network, end=end)
    kind = rng.integers(4)
    if kind < 2:
        module = works[rng.integers(len(works))]
        times_s = module.forward_s if kind == 0 else module.backward_s
        times_s[tuple(rng.integers(size) for size in times_s.shape)] += rng.exponential(1.0)
    elif kind == 2:
        links = [Link(link.latency_s + 0.5, link.bandwidth_bytes_per_s) for link in network.links]
        network = Network(links, network.sends)
    else:
        works = [ModuleWork(w.forward_s, w.backward_s, w.output_bytes * 2) for w in works]
    after = simulate_steps(works, network=network, end=end)
    assert after.step_time_s[0] >= before.step_time_s[0] - 1e-9
    assert after.makespan_s[0] >= before.makespan_s[0] - 1e-9


@given(steps())
@settings(max_examples=30)
def test_cases_do_not_touch_one_another(step):
    works, network, end = step
    stacked = [
        ModuleWork(
            np.concatenate([work.forward_s, 2 * work.forward_s]),
            np.concatenate([work.backward_s, 3 * work.backward_s]),
            np.concatenate([work.output_bytes] * 2),
        )
        for work in works
    ]
    both = simulate_steps(stacked, network=network, end=end)
    first = simulate_steps(works, network=network, end=end)
    np.testing.assert_allclose(both.step_time_s[0], first.step_time_s[0])
    others = [ModuleWork(2 * work.forward_s, 3 * work.backward_s, work.output_bytes) for work in works]
    second = simulate_steps(others, network=network, end=end)
    np.testing.assert_allclose(both.step_time_s[1], second.step_time_s[0])
