"""Bins for ranks and accumulation steps: against brute force, with limits, with nothing known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.rank_bins import plan_rank_bins
from dflop_ds.scheduling.rank_step import RankStep, blind_bins

COST = MicrobatchCost(1e-3, 1e-7, 2e-2, 5e-3)


def draw_step(seed, num_samples, num_ranks, num_slots=1, padded=True, sync="step", **limits):
    rng = np.random.default_rng(seed)
    tokens = np.rint(rng.lognormal(5, 1, num_samples))
    inputs = rng.integers(0, 10, num_samples) * (rng.random(num_samples) < 0.5)
    return RankStep(tokens, inputs.astype(float), num_ranks, num_slots, padded, sync, **limits)


def least_s(step):
    """Shortest predicted step over all assignments that leave no bin empty."""
    times_s = []
    for bin_of in itertools.product(range(step.num_bins), repeat=step.num_samples):
        bins = [[i for i, place in enumerate(bin_of) if place == b] for b in range(step.num_bins)]
        if all(bins):
            times_s.append(step.predict_s(bins, COST))
    return min(times_s)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("sync", ["step", "microbatch", "phase"])
def test_close_to_the_best_of_all_assignments(padded, sync):
    ratios = []
    for seed in range(4):
        step = draw_step(seed, 6, 2, 2, padded, sync)
        ratios.append(plan_rank_bins(step, COST).predicted_s / least_s(step))
    assert min(ratios) >= 1.0 - 1e-9
    assert max(ratios) < 1.06
    assert np.mean(ratios) < 1.02


@pytest.mark.parametrize("padded", [True, False])
def test_close_to_the_least_padding_evenly_shared(padded):
    """No step of 16 ranks can be shorter than its cheapest bins, shared without a remainder."""
    ratios = []
    for seed in range(3):
        step = draw_step(seed, 128, 16, 2, padded)
        total_s = least_total_s(step)
        ratios.append(plan_rank_bins(step, COST).predicted_s * 16 / total_s)
    assert min(ratios) >= 1.0 - 1e-9
    assert np.mean(ratios) < (1.1 if padded else 1.02)


def least_total_s(step):
    """Least sum of bin costs: by an exchange argument that of runs of the sorted samples."""
    tokens = np.sort(step.llm_tokens)[::-1]
    total_s = COST.encoder_input_s * step.encoder_inputs.sum() + COST.overhead_s * step.num_bins
    if not step.padded:
        return total_s + COST.token_s * tokens.sum() + COST.squared_token_s * (tokens**2).sum()
    least_s = np.full(len(tokens) + 1, np.inf)
    least_s[0] = 0.0
    longest_s = COST.token_s * tokens + COST.squared_token_s * tokens**2
    for _ in range(step.num_bins):
        ends = range(1, len(tokens) + 1)
        least_s = np.array(
            [np.inf, *((least_s[:end] + longest_s[:end] * np.arange(end, 0, -1)).min() for end in ends)]
        )
    return total_s + least_s[-1]


def test_prediction_imbalance_and_padding_by_hand():
    step = RankStep(np.array([10.0, 10.0, 2.0, 2.0]), np.zeros(4), 2, 1, True, "step")
    plan = plan_rank_bins(step, MicrobatchCost(1.0, 0.0, 0.0, 0.0))
    assert plan.blind_s == 20.0
    # {10}, {10, 2, 2} costs 30; {10, 10}, {2, 2} costs 20; {10, 2}, {10, 2} costs 20 as well.
    assert plan.predicted_s == 20.0
    assert plan.bins == blind_bins(step)
    assert plan.padding_share == pytest.approx(0.0)
    assert plan.imbalance == pytest.approx(20 / 12)


def test_nothing_known_keeps_the_blind_bins():
    step = draw_step(0, 12, 3)
    plan = plan_rank_bins(step, None)
    assert plan.bins == blind_bins(step)
    assert plan.predicted_s is None and plan.imbalance is None
    assert plan_rank_bins(step, COST, policy="blind").bins == plan.bins


@pytest.mark.parametrize("padded", [True, False])
def test_limits_hold_although_they_cost_time(padded):
    free = draw_step(5, 24, 4, padded=padded)
    sizes = free.sizes(plan_rank_bins(free, COST).bins)
    cap = int(sizes.tokens.max() * 0.98)
    step = draw_step(5, 24, 4, padded=padded, max_tokens=cap)
    plan = plan_rank_bins(step, COST)
    assert plan.fallback_reason is None
    assert step.sizes(plan.bins).tokens.max() <= cap


def test_limits_that_cannot_hold_fall_back_with_the_reason():
    step = draw_step(5, 24, 4, max_tokens=1)
    plan = plan_rank_bins(step, COST)
    assert plan.bins == blind_bins(step)
    assert "max_tokens" in plan.fallback_reason or "cap" in plan.fallback_reason


def test_fewer_samples_than_bins_get_one_bin_each():
    plan = plan_rank_bins(draw_step(1, 3, 4), COST)
    assert sorted(map(len, plan.bins)) == [0, 1, 1, 1]


@pytest.mark.parametrize("sync", ["step", "phase"])
def test_samples_without_any_size_have_a_plan(sync):
    step = RankStep(np.zeros(6), np.zeros(6), 2, 2, True, sync)
    plan = plan_rank_bins(step, MicrobatchCost(1e-3, 0.0, 0.0, 0.0))
    assert (plan.predicted_s, plan.imbalance) == (0.0, 1.0)
    assert sorted(i for members in plan.bins for i in members) == list(range(6))


def test_unknown_policy():
    with pytest.raises(SchedulingError, match="policy"):
        plan_rank_bins(draw_step(0, 4, 2), COST, policy="best")
