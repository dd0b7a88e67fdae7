"""Weighted bins, replica speeds, grouped modules, images in every bin: what holds for any problem."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop_ds.errors import InfeasibleError
from dflop_ds.scheduling.assignment import scaled_loads_s
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.schedule import Effort, schedule
from dflop_ds.scheduling.solve import solve
from dflop_ds.scheduling.sweep import sweep

_checked = settings(max_examples=40)
_EFFORT = {"deterministic_time_s": 0.02}


@st.composite
def problems(draw, max_samples=30, capped=True):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    replicas, microbatches = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    num_bins, num_samples = replicas * microbatches, draw(st.integers(1, max_samples))
    modules = draw(st.integers(1, 3))
    options = {}
    if draw(st.booleans()):
        options["bin_weights"] = rng.uniform(0.2, 2.0, num_bins)
    if draw(st.booleans()):
        options["replica_speeds"] = rng.uniform(0.5, 2.0, replicas)
    if draw(st.booleans()):
        options |= {"grouped_modules": (0,), "replicas_per_group": draw(st.sampled_from([1, replicas]))}
    if num_samples >= num_bins and draw(st.booleans()):
        has_image = np.zeros(num_samples, dtype=bool)
        has_image[rng.permutation(num_samples)[: draw(st.integers(num_bins, num_samples))]] = True
        options["has_image"] = has_image
    if capped and draw(st.booleans()):
        options |= {"sizes": rng.integers(0, 10, (num_samples, 1)), "cap_names": ("tokens",)}
        options["caps"] = np.array([10 + draw(st.integers(0, 80))])
    return Problem(rng.lognormal(0.0, 1.0, (num_samples, modules)), replicas, microbatches, **options)


@pytest.mark.parametrize("policy", ["lpt", "cp_sat"])
@_checked
@given(problem=problems())
def test_every_rule_holds(policy, problem):
    try:
        solution = solve(problem, policy=policy, **_EFFORT)
    except InfeasibleError:
        return
    bins = solution.assignment.bins
    assert solution.fallback_reason is None
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(problem.num_samples))
    solution.assignment.validate(problem)
    assert solution.ratio_to_bound >= 1.0
    if problem.has_image.size:
        assert all(problem.has_image[list(members)].any() for members in bins)
    if problem.num_samples >= problem.num_bins:
        assert all(bins), "no bin is empty"
    assert solve(problem, policy=policy, **_EFFORT).assignment == solution.assignment


@_checked
@given(problem=problems(max_samples=6, capped=False))
def test_the_bound_and_the_optimum_of_small_problems(problem):
    best_s = np.inf
    if problem.num_bins**problem.num_samples > 5000:
        return
    for bin_of in itertools.product(range(problem.num_bins), repeat=problem.num_samples):
        places = np.array(bin_of)
        if not problem.has_image.size or len(set(places[problem.has_image])) == problem.num_bins:
            best_s = min(best_s, scaled_loads_s(problem, places).max())
    assert lower_bound_s(problem) <= best_s * (1 + 1e-9)
    solution = solve(problem, policy="cp_sat")
    if problem.num_samples >= problem.num_bins and problem.num_bins > 1:
        # An empty bin is never left, which can cost something where weights differ.
        assert solution.largest_bin_s >= best_s * (1 - 1e-9)
    if solution.solver == "optimal" and problem.has_equal_bins:
        assert solution.largest_bin_s == pytest.approx(best_s, rel=1e-6)


@_checked
@given(problem=problems())
def test_cp_sat_is_never_worse_than_its_seed(problem):
    try:
        lpt = solve(problem, policy="lpt")
    except InfeasibleError:
        return
    assert solve(problem, policy="cp_sat", **_EFFORT).largest_bin_s <= lpt.largest_bin_s * (1 + 1e-12)


@_checked
@given(problem=problems(), seed=st.integers(0, 100))
def test_sweeps_never_raise_the_largest_bin_nor_break_a_cap(problem, seed):
    try:
        start = solve(problem, policy="blind").assignment.bin_of()
    except InfeasibleError:
        return
    end = sweep(problem, start, 8, seed)
    assert scaled_loads_s(problem, end).max() <= scaled_loads_s(problem, start).max() * (1 + 1e-12)
    used = np.zeros((problem.num_bins, len(problem.limit_caps)), dtype=np.int64)
    np.add.at(used, end, problem.limit_sizes)
    assert (used <= problem.limit_caps).all()


@_checked
@given(problem=problems(), order=st.booleans(), min_gain=st.sampled_from([0.0, 0.3]))
def test_a_schedule_is_a_valid_assignment_and_keeps_its_word(problem, order, min_gain):
    if problem.bin_weights.size:
        return
    effort = Effort(policy="lpt", order=order, min_gain=min_gain)
    try:
        found = schedule(problem, problem.costs_s / 3, problem.costs_s * 2 / 3, effort)
    except InfeasibleError:
        return
    found.assignment.validate(problem)
    if found.blind_makespan_s is not None:
        assert found.makespan_s <= found.blind_makespan_s * (1 + 1e-12)
        assert found.kept_blind or found.gain >= min_gain
