"""Bins of ranks: every sample once, never slower than data-blind, limits kept, reproducible."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.scheduling.rank_bins import plan_rank_bins
from dflop_ds.scheduling.rank_step import SYNC_POINTS, RankStep

COSTS = st.builds(
    MicrobatchCost,
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-7),
    st.floats(0, 1e-1),
    st.floats(0, 1e-1),
)


@st.composite
def steps(draw):
    num_ranks, num_slots = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_samples = draw(st.integers(1, 40))
    tokens = draw(st.lists(st.integers(1, 5000), min_size=num_samples, max_size=num_samples))
    inputs = draw(st.lists(st.integers(0, 30), min_size=num_samples, max_size=num_samples))
    cap = draw(st.none() | st.integers(max(tokens), 20_000))
    return RankStep(
        np.array(tokens, float),
        np.array(inputs, float),
        num_ranks,
        num_slots,
        draw(st.booleans()),
        draw(st.sampled_from(SYNC_POINTS)),
        max_tokens=cap,
    )


@settings(max_examples=60)
@given(steps(), COSTS)
def test_plans_are_valid(step, cost):
    plan = plan_rank_bins(step, cost)
    assert sorted(i for members in plan.bins for i in members) == list(range(step.num_samples))
    assert len(plan.bins) == step.num_bins
    if step.num_samples >= step.num_bins:
        assert all(plan.bins)
    if plan.fallback_reason is None and step.num_samples >= step.num_bins:
        sizes = step.sizes(plan.bins)
        assert step.max_tokens is None or sizes.tokens.max() <= step.max_tokens
        blind_is_allowed = step.keeps_limits(step.sizes(plan_rank_bins(step, None).bins))
        assert plan.predicted_s <= plan.blind_s * (1 + 1e-9) or not blind_is_allowed
    assert plan_rank_bins(step, cost).bins == plan.bins
