import itertools
import logging
import time

import numpy as np
import pytest

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling import neighbourhood
from dflop_ds.scheduling import solve as solve_module
from dflop_ds.scheduling.assignment import Assignment, bin_loads_s
from dflop_ds.scheduling.blind import solve_blind
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.lpt import solve_lpt
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.solve import solve


def _lognormal(num_samples, num_modules, seed=0, sigma=0.5):
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(0.0, sigma, (num_samples, num_modules)))


def _largest_s(problem, assignment):
    return bin_loads_s(problem, assignment).max()


def _optimum_s(problem):
    """Smallest largest bin over every assignment within the caps."""
    best_s = np.inf
    for bin_of in itertools.product(range(problem.num_bins), repeat=problem.num_samples):
        places = np.eye(problem.num_bins)[list(bin_of)].T
        if problem.num_caps == 0 or (places @ problem.sizes <= problem.caps).all():
            best_s = min(best_s, (places @ problem.costs_s).max())
    return best_s


def test_blind_deals_samples_like_a_distributed_sampler():
    problem = Problem(np.ones((8, 1)), num_replicas=2, num_microbatches=2)
    assert solve_blind(problem).bins == ((0, 2), (4, 6), (1, 3), (5, 7))


def test_blind_gives_the_first_microbatches_one_more():
    problem = Problem(np.ones((11, 1)), num_replicas=2, num_microbatches=3)
    assert solve_blind(problem).bins == ((0, 2), (4, 6), (8, 10), (1, 3), (5, 7), (9,))


def test_blind_names_the_bin_and_cap_that_overflow():
    problem = Problem(
        np.ones((4, 1)), 1, 2, sizes=np.array([[1], [1], [3], [3]]), caps=np.array([4]), cap_names=("tokens",)
    )
    with pytest.raises(InfeasibleError, match=r"bin 1 .* holds 6 of tokens, the cap is 4.*policy"):
        solve_blind(problem)


def test_lpt_by_hand():
    # Longest first alone ends with 3+2+2 and 3+2; exchanging a 3 for a 2 leaves 2+2+2 and 3+3.
    problem = Problem(np.array([[3.0], [3.0], [2.0], [2.0], [2.0]]), 1, 2)
    assert _largest_s(problem, solve_lpt(problem)) == 6.0
    # Two modules: each bin gets one encoder-heavy and one LLM-heavy sample.
    problem = Problem(np.array([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 4.0]]), 1, 2)
    assert _largest_s(problem, solve_lpt(problem)) == 4.0


def test_lpt_balances_the_cheaper_module_as_well():
    # Module 0 is decided by one giant sample; the cheap module 1 must still be spread.
    costs_s = np.array([[10.0, 0.0]] + [[0.0, 0.1]] * 12)
    loads_s = bin_loads_s(problem := Problem(costs_s, 1, 4), solve_lpt(problem))
    assert loads_s[:, 0].max() == 10.0
    assert sorted(loads_s[:, 1].round(6)) == pytest.approx([0.3, 0.3, 0.3, 0.3])


def test_first_fit_saves_what_lpt_cannot_place():
    # By cost, each cheap sample of size 3 meets bins with only 2 left.
    sizes = np.array([[2], [2], [3], [3], [4], [4]])
    costs_s = np.array([[9.0], [8.0], [2.0], [2.0], [1.0], [1.0]])
    problem = Problem(costs_s, 1, 2, sizes=sizes, caps=np.array([9]), cap_names=("tokens",))
    assignment = solve_lpt(problem)
    assignment.validate(problem)
    assert _largest_s(problem, assignment) < 19.0


def test_infeasible_says_why_and_how_many_bins_help():
    problem = Problem(
        np.ones((6, 1)), 1, 2, sizes=np.full((6, 1), 3), caps=np.array([7]), cap_names=("tokens",)
    )
    with pytest.raises(
        InfeasibleError, match=r"needs 18 of tokens, 2 bins hold 14.*at least 3 bins"
    ) as error:
        solve_lpt(problem)
    assert error.value.min_bins == 3
    tight = Problem(
        np.ones((3, 1)), 1, 2, sizes=np.full((3, 1), 4), caps=np.array([7]), cap_names=("tokens",)
    )
    with pytest.raises(InfeasibleError, match="no way was found to fit the 3 samples into 2 bins") as error:
        solve_lpt(tight)
    assert error.value.min_bins == 3


def test_a_zero_cap_allows_samples_of_size_zero():
    problem = Problem(
        np.ones((4, 1)), 1, 2, sizes=np.zeros((4, 1), int), caps=np.array([0]), cap_names=("tiles",)
    )
    assert [len(members) for members in solve_lpt(problem).bins] == [2, 2]


def test_lpt_is_close_to_the_bound_and_fast_at_2048_samples():
    problem = Problem(_lognormal(2048, 2), 2, 128)
    started_s = time.process_time()
    assignment = solve_lpt(problem)
    computed_s = time.process_time() - started_s
    assert _largest_s(problem, assignment) <= 1.02 * lower_bound_s(problem)
    assert computed_s < 2.0  # 0.07 s on a core of today


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_cap", [False, True])
def test_cp_sat_is_optimal_on_small_instances(seed, with_cap):
    rng = np.random.default_rng(seed)
    options = {}
    if with_cap:
        options = {"sizes": rng.integers(1, 6, (8, 1)), "caps": np.array([12]), "cap_names": ("tokens",)}
    problem = Problem(_lognormal(8, 2, seed, 1.0), 1, 3, **options)
    solution = solve(problem, policy="cp_sat")
    assert solution.solver == "optimal"
    assert solution.largest_bin_s == pytest.approx(_optimum_s(problem), rel=1e-6)


def test_cp_sat_improves_a_poor_seed_within_caps():
    costs_s = _lognormal(96, 2)
    sizes = np.random.default_rng(1).integers(1, 10, (96, 1))
    problem = Problem(costs_s, 2, 8, sizes=sizes, caps=np.array([60]), cap_names=("tokens",))
    seed = solve_blind(problem)
    result = neighbourhood.improve(problem, seed, deterministic_time_s=0.3)
    result.assignment.validate(problem)
    assert result.failure is None
    assert _largest_s(problem, result.assignment) <= 1.02 * lower_bound_s(problem)
    again = neighbourhood.improve(problem, seed, deterministic_time_s=0.3)
    assert again == result


def test_neighbourhoods_alone_lower_the_largest_bin(monkeypatch):
    monkeypatch.setattr(neighbourhood, "descend", lambda *arguments, **options: None)
    problem = Problem(_lognormal(80, 1, sigma=0.8), 1, 10)
    seed = solve_blind(problem)
    result = neighbourhood.improve(problem, seed, deterministic_time_s=0.5)
    result.assignment.validate(problem)
    assert _largest_s(problem, seed) > 1.3 * lower_bound_s(problem)
    assert _largest_s(problem, result.assignment) <= 1.03 * lower_bound_s(problem)


def test_bins_with_many_samples_are_searched_in_part(monkeypatch):
    monkeypatch.setattr(neighbourhood, "descend", lambda *arguments, **options: None)
    problem = Problem(_lognormal(400, 2), 1, 3)
    seed = solve_blind(problem)
    result = neighbourhood.improve(problem, seed, deterministic_time_s=0.3)
    result.assignment.validate(problem)
    assert _largest_s(problem, result.assignment) < _largest_s(problem, seed)


def test_sizes_beyond_32_bits_keep_their_cap():
    sizes = np.array([[60], [50], [40], [40], [30], [20]]) * 10**9 + 7
    problem = Problem(_lognormal(6, 1), 1, 3, sizes=sizes, caps=np.array([100 * 10**9]), cap_names=("bytes",))
    solve(problem, policy="cp_sat").assignment.validate(problem)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_cp_sat_does_not_depend_on_the_unit(scale):
    costs_s = _lognormal(12, 2, sigma=1.0)
    reference = solve(Problem(costs_s, 1, 4), policy="cp_sat")
    scaled = solve(Problem(costs_s * scale, 1, 4), policy="cp_sat")
    assert scaled.largest_bin_s == pytest.approx(reference.largest_bin_s * scale, rel=1e-6)


def test_cp_sat_keeps_every_bin_filled():
    # One giant sample leaves the solver free to pile up the rest; no microbatch may end up empty.
    problem = Problem(np.array([[9.0], [5.0], [5.0], [2.0], [2.0], [2.0], [2.0]]), 1, 4)
    solution = solve(problem, policy="cp_sat")
    assert solution.largest_bin_s == 9.0
    assert all(solution.assignment.bins)


@pytest.mark.parametrize("num_samples", [12, 96])
@pytest.mark.parametrize("status", ["UNKNOWN", "MODEL_INVALID"])
def test_a_solver_without_answer_returns_the_seed(monkeypatch, caplog, num_samples, status):
    def no_answer(group, budget, time_s, random_seed):
        budget.left_s -= 0.1
        return status, None

    monkeypatch.setattr(neighbourhood, "_solve", no_answer)
    monkeypatch.setattr(neighbourhood, "_ENOUGH_RATIO", 0.0)
    solve_module._warn_once.cache_clear()
    problem = Problem(_lognormal(num_samples, 1), 1, num_samples // 3)
    with caplog.at_level(logging.WARNING, logger="dflop_ds"):
        first, second = solve(problem, policy="cp_sat"), solve(problem, policy="cp_sat")
    assert first.assignment == second.assignment == solve_lpt(problem)
    assert first.solver == "lpt"
    assert status in first.fallback_reason
    assert len(caplog.records) == 1, "one warning per reason"


def test_any_failure_of_cp_sat_falls_back(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no license for that")

    monkeypatch.setattr(neighbourhood, "improve", broken)
    problem = Problem(_lognormal(12, 1), 1, 4)
    solution = solve(problem, policy="cp_sat")
    assert solution.assignment == solve_lpt(problem)
    assert solution.fallback_reason == "CP-SAT raised RuntimeError: no license for that"


def test_a_broken_answer_of_cp_sat_falls_back(monkeypatch):
    broken = neighbourhood.CpSatResult(Assignment(((0,), (), (), ())), None)
    monkeypatch.setattr(neighbourhood, "improve", lambda *args, **options: broken)
    problem = Problem(_lognormal(12, 1), 1, 4)
    solution = solve(problem, policy="cp_sat")
    assert solution.assignment == solve_lpt(problem)
    assert "SchedulingError" in solution.fallback_reason


def test_a_missing_ortools_falls_back(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dflop_ds.scheduling.neighbourhood", None)
    solution = solve(Problem(_lognormal(12, 1), 1, 4), policy="cp_sat")
    assert solution.solver == "lpt"
    assert "CP-SAT raised" in solution.fallback_reason


def test_the_wall_clock_deadline_is_kept():
    problem = Problem(_lognormal(200, 2, sigma=0.2), 1, 60)
    started_s = time.perf_counter()
    solution = solve(problem, policy="cp_sat", deterministic_time_s=1e6, deadline_s=0.2)
    assert time.perf_counter() - started_s < 60.0  # the budget alone would last for days
    solution.assignment.validate(problem)


def test_errors_of_the_input_are_not_swallowed():
    problem = Problem(np.ones((3, 1)), 1, 2)
    with pytest.raises(SchedulingError, match="policy must be one of"):
        solve(problem, policy="magic")
    with pytest.raises(SchedulingError, match="must be positive"):
        solve(problem, policy="cp_sat", deterministic_time_s=0.0)
    with pytest.raises(SchedulingError, match="in exactly one bin"):
        neighbourhood.improve(problem, Assignment(((0,), (1,))))


def test_solution_reports_its_quality():
    problem = Problem(np.array([[5.0], [5.0], [5.0]]), 1, 2)
    solution = solve(problem, policy="blind")
    assert (solution.solver, solution.largest_bin_s, solution.bound_s) == ("blind", 10.0, 10.0)
    assert solution.ratio_to_bound == 1.0
    assert solution.solve_time_s >= 0.0
    assert solve(Problem(np.zeros((3, 1)), 1, 2), policy="cp_sat").ratio_to_bound == 1.0
