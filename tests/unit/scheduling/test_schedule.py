"""Ramp, schedule, blocks and the rules of weighted, grouped and image-bound bins."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.assignment import bin_loads_s, scaled_loads_s
from dflop_ds.scheduling.blocks import block_problem, split_bins
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.lpt import solve_lpt
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.ramp import ramp_weights
from dflop_ds.scheduling.schedule import Effort, schedule
from dflop_ds.scheduling.solve import solve
from dflop_ds.simulation.pipeline import simulate_1f1b


def _lognormal(num_samples: int, num_modules: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, 0.4, (num_samples, num_modules))


@pytest.mark.parametrize(("stages", "least_gain"), [(2, 0.02), (4, 0.05), (8, 0.06)])
def test_a_ramp_shortens_the_pipeline_of_divisible_microbatches(stages: int, least_gain: float) -> None:
    forward_s = np.ones(stages)
    weights = np.array(ramp_weights(tuple(forward_s), tuple(2 * forward_s), 16))
    assert weights.mean() == pytest.approx(1.0)
    assert max(weights[0], weights[-1]) < weights.max()
    equal, ramp = (
        simulate_1f1b(np.outer(forward_s, w), np.outer(2 * forward_s, w)).makespan_s
        for w in (np.ones(16), weights)
    )
    assert 1.0 - ramp / equal >= least_gain


@pytest.mark.parametrize("times", [(1.0,), (0.0, 0.0)])
def test_without_a_pipeline_or_work_there_is_no_ramp(times: tuple[float, ...]) -> None:
    assert ramp_weights(times, times, 4) == (1.0,) * 4


def test_a_schedule_beats_perfectly_equal_microbatches() -> None:
    forward_s = np.repeat(_lognormal(512, 1), 8, axis=1)
    found = schedule(
        Problem(3 * forward_s, 4, 16), forward_s, 2 * forward_s, Effort(deterministic_time_s=0.1)
    )
    share_s = np.repeat(forward_s.sum(axis=0)[:, None] / 64, 16, axis=1)
    equal_s = simulate_1f1b(share_s, 2 * share_s).makespan_s
    assert found.makespan_s <= 0.97 * equal_s
    assert found.blind_makespan_s is not None
    assert found.makespan_s < found.blind_makespan_s


def test_min_gain_must_be_a_share() -> None:
    with pytest.raises(SchedulingError, match="min_gain"):
        Effort(min_gain=1.0)


def test_loads_follow_the_weights_and_speeds() -> None:
    options = {"bin_weights": np.array([1.0, 3.0, 1.0, 3.0]), "replica_speeds": np.array([1.0, 2.0])}
    problem = Problem(np.ones((120, 1)), 2, 2, **options)
    counts = [len(members) for members in solve_lpt(problem).bins]
    assert counts == [10, 30, 20, 60]


def test_a_grouped_module_counts_per_group() -> None:
    """Two replicas share an encoder: the bins of one column together hold its load."""
    costs_s = np.zeros((8, 2))
    costs_s[:4, 0] = 1.0  # encoder work
    problem = Problem(costs_s, 2, 2, grouped_modules=(0,), replicas_per_group=2)
    assert lower_bound_s(problem) == 1.0
    solution = solve(problem, policy="lpt")
    columns = bin_loads_s(problem, solution.assignment)[:, 0].reshape(2, 2).sum(axis=0)
    assert columns.tolist() == [2.0, 2.0]
    assert scaled_loads_s(problem, solution.assignment.bin_of())[:, 0].tolist() == [1.0] * 4


def test_too_few_images_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="found 1 such samples"):
        Problem(np.ones((4, 1)), 1, 2, has_image=np.array([True, False, False, False]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bin_weights": [1.0]}, "bin_weights must be 4"),
        ({"bin_weights": [1.0, 0.0, 1.0, 1.0]}, "bin_weights"),
        ({"replica_speeds": [1.0, np.inf]}, "replica_speeds"),
        ({"grouped_modules": (1,)}, "grouped_modules"),
        ({"grouped_modules": (0,), "replicas_per_group": 3}, "must divide"),
        ({"has_image": [True]}, "has_image"),
    ],
)
def test_bad_bins_are_refused(options: dict, message: str) -> None:
    with pytest.raises(SchedulingError, match=message):
        Problem(np.ones((4, 1)), 2, 2, **options)


def test_caps_raise_the_bound() -> None:
    """Two bins of cap 4: the bin of the costly sample must take three of the size-1 samples."""
    costs_s = np.array([[10.0]] + [[1.0]] * 7)
    sizes, caps = np.ones((8, 1), dtype=np.int64), np.array([4])
    problem = Problem(costs_s, 1, 2, sizes, caps, ("tokens",))
    assert lower_bound_s(problem) == 13.0
    assert solve(problem, policy="cp_sat").largest_bin_s == 13.0


def test_the_second_module_is_balanced_in_the_exact_model() -> None:
    costs_s = np.array([[6.0, 0.0], [6.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    solution = solve(Problem(costs_s, 1, 2), policy="cp_sat")
    assert solution.solver == "optimal"
    assert bin_loads_s(Problem(costs_s, 1, 2), solution.assignment)[:, 1].tolist() == [2.0, 2.0]


def test_blocks_hold_every_bin_and_sample_once() -> None:
    problem = Problem(_lognormal(2400, 2), 20, 30)
    bin_of = solve_lpt(problem).bin_of()
    blocks = split_bins(problem, bin_of)
    assert len(blocks) == 3
    assert np.sort(np.concatenate(blocks)).tolist() == list(range(600))
    parts = [block_problem(problem, bin_of, bins) for bins in blocks]
    assert np.sort(np.concatenate([part.samples for part in parts])).tolist() == list(range(2400))
    peak_s = max(bin_loads_s(part.problem, _assignment(part)).max() for part in parts)
    assert peak_s == pytest.approx(scaled_loads_s(problem, bin_of).max())


def _assignment(part):
    from dflop_ds.scheduling.assignment import Assignment

    return Assignment.from_bin_of(part.bin_of, part.problem.num_bins)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_large_world_is_solved_in_blocks(num_workers: int) -> None:
    problem = Problem(_lognormal(2400, 2), 20, 30)
    lpt = solve(problem, policy="lpt")
    found = [solve(problem, deterministic_time_s=0.2, num_workers=num_workers, seed=3) for _ in range(2)]
    assert found[0].assignment == found[1].assignment
    assert found[0].largest_bin_s < lpt.largest_bin_s
    assert found[0].fallback_reason is None
