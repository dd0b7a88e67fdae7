"""What must hold for every scheduling problem."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.assignment import bin_loads_s, imbalance
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.ordering import order_bins
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.solve import POLICIES, solve

_checked = settings(max_examples=40)
_EFFORT = {"deterministic_time_s": 0.02}


@st.composite
def problems(draw, max_samples=40, max_bins=12, capped=None):
    num_samples = draw(st.integers(0, max_samples))
    num_modules = draw(st.integers(1, 3))
    num_replicas = draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, max(1, max_bins // num_replicas)))
    # Twelve orders of magnitude in one batch, exact zeros and ties included.
    cost = st.one_of(st.just(0.0), st.just(1.0), st.floats(-6, 6).map(lambda power: 10.0**power))
    costs_s = draw(hnp.arrays(np.float64, (num_samples, num_modules), elements=cost))
    if capped is False or (capped is None and draw(st.booleans())):
        return Problem(costs_s, num_replicas, num_microbatches)
    sizes = draw(hnp.arrays(np.int64, (num_samples, 2), elements=st.integers(0, 20)))
    caps = np.array([draw(st.integers(20, 120)), draw(st.integers(20, 120))])
    return Problem(costs_s, num_replicas, num_microbatches, sizes, caps, ("tokens", "tiles"))


def _used(problem, assignment):
    return np.array([problem.sizes[list(members)].sum(axis=0) for members in assignment.bins])


@pytest.mark.parametrize("policy", POLICIES)
@_checked
@given(problem=problems())
def test_a_solution_is_a_partition_within_the_caps(policy, problem):
    try:
        solution = solve(problem, policy=policy, **_EFFORT)
    except InfeasibleError as error:
        min_bins = error.min_bins
    else:
        min_bins = None
        _check(problem, policy, solution)
    assert policy == "blind" or min_bins is None or min_bins > problem.num_bins


def _check(problem, policy, solution):
    bins = solution.assignment.bins
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(problem.num_samples))
    assert len(bins) == problem.num_replicas * problem.num_microbatches, "equal microbatch counts"
    assert (_used(problem, solution.assignment) <= problem.caps).all()
    assert solution.ratio_to_bound >= 1.0
    assert imbalance(problem, solution.assignment) >= 1.0 - 1e-12
    if problem.num_samples >= problem.num_bins:
        assert all(bins), "no bin is empty"
    else:
        assert policy == "blind" or problem.num_caps or max(map(len, bins), default=0) <= 1


@pytest.mark.parametrize("policy", POLICIES)
@_checked
@given(problem=problems(max_samples=24))
def test_the_same_problem_has_the_same_solution(policy, problem):
    def answer():
        try:
            return solve(problem, policy=policy, **_EFFORT).assignment
        except InfeasibleError as error:
            return str(error)

    assert answer() == answer()


@_checked
@given(problem=problems(max_samples=40))
def test_cp_sat_is_never_worse_than_lpt(problem):
    try:
        lpt = solve(problem, policy="lpt")
    except InfeasibleError:
        return
    cp_sat = solve(problem, policy="cp_sat", **_EFFORT)
    assert cp_sat.largest_bin_s <= lpt.largest_bin_s * (1 + 1e-12)


@_checked
@given(problem=problems(max_samples=6, max_bins=3))
def test_small_problems_are_solved_to_the_optimum(problem):
    best_s = np.inf
    for bin_of in itertools.product(range(problem.num_bins), repeat=problem.num_samples):
        places = np.eye(problem.num_bins)[list(bin_of)].T.reshape(problem.num_bins, problem.num_samples)
        if (places @ problem.sizes <= problem.caps).all():
            best_s = min(best_s, (places @ problem.costs_s).max(initial=0.0))
    assert lower_bound_s(problem) <= best_s * (1 + 1e-12)
    try:
        solution = solve(problem, policy="cp_sat")
    except InfeasibleError:
        return  # first-fit may miss a way; it must not miss one when caps are absent
    assert solution.largest_bin_s == pytest.approx(best_s, rel=1e-6)


@_checked
@given(problem=problems(capped=False))
def test_lpt_keeps_its_worst_case_ratio(problem):
    # Greedy: a bin ends at most one sample above the mean bin, summed over the modules.
    solution = solve(problem, policy="lpt")
    single = Problem(problem.costs_s[:, :1], problem.num_replicas, problem.num_microbatches)
    assert solve(single, policy="lpt").ratio_to_bound <= 2.0
    assert solution.ratio_to_bound <= problem.num_modules + 1.0


@pytest.mark.parametrize("policy", POLICIES)
@_checked
@given(
    num_samples=st.integers(1, 30),
    num_bins=st.integers(1, 10),
    cost_s=st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
)
def test_equal_samples_are_counted_out_evenly(policy, num_samples, num_bins, cost_s):
    problem = Problem(np.full((num_samples, 2), cost_s), 1, num_bins)
    counts = [len(members) for members in solve(problem, policy=policy, **_EFFORT).assignment.bins]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("policy", ["lpt", "cp_sat"])
@_checked
@given(num_small=st.integers(4, 40), num_bins=st.integers(2, 8))
def test_a_giant_sample_sits_alone(policy, num_small, num_bins):
    costs_s = np.ones((num_small + 1, 1))
    costs_s[num_small // 2] = 1e6
    solution = solve(Problem(costs_s, 1, num_bins), policy=policy, **_EFFORT)
    assert (num_small // 2,) in solution.assignment.bins
    assert solution.largest_bin_s == 1e6


@pytest.mark.parametrize("policy", ["lpt", "cp_sat"])
@_checked
@given(num_samples=st.integers(2, 30), num_bins=st.integers(2, 6))
def test_a_module_without_cost_changes_nothing(policy, num_samples, num_bins):
    costs_s = np.random.default_rng(num_samples).exponential(1.0, (num_samples, 1))
    alone = solve(Problem(costs_s, 1, num_bins), policy=policy, **_EFFORT)
    both = solve(Problem(np.hstack([costs_s, np.zeros_like(costs_s)]), 1, num_bins), policy=policy, **_EFFORT)
    assert both.largest_bin_s == pytest.approx(alone.largest_bin_s, rel=0.02)


@_checked
@given(
    position=st.integers(0, 9),
    module=st.integers(0, 1),
    value=st.sampled_from([np.nan, np.inf, -np.inf, -1.0, -1e-300]),
)
def test_a_bad_cost_is_refused_by_name(position, module, value):
    costs_s = np.ones((10, 2))
    costs_s[position, module] = value
    with pytest.raises(SchedulingError, match=f"'id-{position}' in module {module}"):
        Problem(costs_s, 1, 2, sample_ids=tuple(f"id-{index}" for index in range(10)))


@_checked
@given(problem=problems(capped=False))
def test_ordering_only_permutes_bins(problem):
    assignment = solve(problem, policy="lpt").assignment
    ordered = order_bins(
        assignment,
        forward_s=problem.costs_s,
        backward_s=2.0 * problem.costs_s,
        num_replicas=problem.num_replicas,
        num_microbatches=problem.num_microbatches,
    )
    assert sorted(ordered.bins) == sorted(assignment.bins)
    np.testing.assert_array_equal(
        np.sort(bin_loads_s(problem, ordered).max(axis=1)),
        np.sort(bin_loads_s(problem, assignment).max(axis=1)),
    )
