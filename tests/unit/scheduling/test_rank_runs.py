"""Runs of samples of similar length: the best cuts by brute force, limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.scheduling.rank_runs import cut_into_runs
from dflop_ds.scheduling.rank_step import RankStep

COST = MicrobatchCost(1.0, 0.0, 10.0, 3.0)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("power", [1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_cut_costs_less(seed, power, padded):
    rng = np.random.default_rng(seed)
    tokens, inputs = rng.integers(1, 50, 9), rng.integers(0, 3, 9)
    step = RankStep(tokens.astype(float), inputs.astype(float), 3, 1, padded, "step")
    order = np.lexsort((-inputs, -tokens))

    def total(runs):
        computed = [tokens[run].max() * len(run) if padded else tokens[run].sum() for run in runs]
        costs = [count + 10 * inputs[run].sum() + 3 for count, run in zip(computed, runs, strict=True)]
        return sum(float(cost) ** power for cost in costs)

    cuts = itertools.combinations(range(1, 9), 2)
    best = min(total([order[a:b] for a, b in itertools.pairwise((0, *edges, 9))]) for edges in cuts)
    runs = cut_into_runs(step, COST, power)
    assert np.concatenate(runs).tolist() == order.tolist()
    assert total(runs) == pytest.approx(best)


def test_runs_keep_limits_or_there_are_none():
    tokens = np.array([8.0, 8.0, 2.0, 2.0, 2.0])
    step = RankStep(tokens, np.zeros(5), 3, 1, True, "step", max_tokens=8)
    assert [run.tolist() for run in cut_into_runs(step, COST, 1.0)] == [[0], [1], [2, 3, 4]]
    too_small = RankStep(tokens, np.zeros(5), 3, 1, True, "step", max_tokens=5)
    assert cut_into_runs(too_small, COST, 1.0) is None
