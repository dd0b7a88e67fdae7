"""Epochs of planned steps: lengths as accelerate counts them, every sample once, costs from a step on."""

from __future__ import annotations

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.errors import PlanError, SchedulingError
from dflop_ds.scheduling.rank_planner import CostTimeline, RankLayout, RankPlanner
from dflop_ds.shapes import SampleShape, ShapeTable

COST = MicrobatchCost(1e-3, 0.0, 1e-2, 0.0)


def make_table(num_samples, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(num_samples):
        tokens, tiles = int(rng.integers(10, 900)), int(rng.integers(0, 9))
        rows.append(SampleShape(str(i), tiles, 0, tokens, tokens, tokens))
    return ShapeTable.from_shapes(rows)


def order(epoch):
    return np.random.default_rng(epoch).permutation(37)


def make_planner(timeline=None, num_slots=2, drop_last=False):
    layout = RankLayout(37, 3, 2, num_slots, drop_last)
    return RankPlanner(make_table(37), layout, order, padded=True, sync="step", timeline=timeline)


@pytest.mark.parametrize("num_samples", range(8, 60, 5))
@pytest.mark.parametrize("drop_last", [True, False])
def test_length_is_what_accelerate_counts(num_samples, drop_last):
    layout = RankLayout(num_samples, 4, 2, 3, drop_last)
    for rank in range(2):
        inner = BatchSampler(range(num_samples), 4, drop_last=drop_last)
        shard = BatchSamplerShard(inner, num_processes=2, process_index=rank)
        assert layout.batches_per_rank == len(shard) == len(list(shard))
    assert sum(layout.slots(index) for index in range(layout.steps_per_epoch)) == layout.batches_per_rank


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_an_epoch_holds_the_plain_global_batches(drop_last, num_slots):
    planner = make_planner(CostTimeline([(0, COST)]), num_slots, drop_last)
    steps, size = planner.layout.steps_per_epoch, num_slots * 6
    seen = []
    for index in range(steps):
        planned = planner.plan(steps + index)  # the second epoch
        samples = [i for members in planned.plan.bins for i in members]
        assert sorted(samples) == sorted(order(1)[index * size : (index + 1) * size][: len(samples)].tolist())
        assert planned.filler in samples
        seen += samples
    expected = order(1)[:36] if drop_last else order(1)
    assert sorted(seen) == sorted(expected.tolist())


def test_costs_apply_from_their_step_on_and_survive_a_checkpoint():
    timeline = CostTimeline()
    planner = make_planner(timeline)
    before = [planner.plan(step) for step in range(3)]
    assert all(planned.found.predicted_s is None for planned in before)
    timeline.add(planner.next_unplanned, COST)
    later = [planner.plan(step) for step in range(3, 6)]
    assert all(planned.found.predicted_s is not None for planned in later)
    resumed = make_planner(CostTimeline.from_dict(timeline.to_dict()))
    again = [resumed.plan(step) for step in range(6)]
    assert [planned.plan for planned in again] == [planned.plan for planned in before + later]
    assert [planned.checksum for planned in again] == [planned.checksum for planned in before + later]


def test_foreign_state_orders_and_shapes_are_refused():
    with pytest.raises(PlanError, match="schema_version"):
        CostTimeline.from_dict({"schema_version": 9, "entries": []})
    layout = RankLayout(37, 3, 2, 1, False)
    with pytest.raises(SchedulingError, match="37 samples"):
        RankPlanner(make_table(5), layout, order, padded=True, sync="step")
    twice = RankPlanner(make_table(37), layout, lambda epoch: np.zeros(37), padded=True, sync="step")
    with pytest.raises(SchedulingError, match="once"):
        twice.plan(0)
    with pytest.raises(SchedulingError, match="at least one batch"):
        RankLayout(3, 4, 2, 1, True)


def test_media_candidates_are_the_shortest_that_have_some():
    sizes = ((0, 0, 1), (2, 0, 9), (1, 0, 5), (1, 0, 7), (0, 8, 6))  # tiles, frames, tokens
    rows = [SampleShape("", tiles, frames, tokens, tokens, tokens) for tiles, frames, tokens in sizes]
    planner = RankPlanner(
        ShapeTable.from_shapes(rows), RankLayout(5, 1, 1, 1, False), order, padded=True, sync="step"
    )
    assert planner.media_candidates(with_frames=False, limit=2) == [2, 3]
    assert planner.media_candidates(with_frames=True, limit=2) == [4]
    assert planner.shortest_first([1, 0, 4]) == [0, 4, 1]
