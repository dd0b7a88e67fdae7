"""Step time of data-parallel ranks, data-blind bins, placement, runs of similar length."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.rank_step import RankStep, blind_bins, contiguous_groups, place_bins, step_time_s

COST = MicrobatchCost(1.0, 0.0, 10.0, 0.0)


def make_step(tokens, inputs=None, num_ranks=2, num_slots=1, padded=True, sync="step", **limits):
    inputs = np.zeros(len(tokens)) if inputs is None else inputs
    return RankStep(
        np.array(tokens, float), np.array(inputs, float), num_ranks, num_slots, padded, sync, **limits
    )


def test_step_time_by_hand():
    phases_s = np.array([[[1.0, 2.0], [3.0, 0.0]], [[2.0, 0.0], [1.0, 1.0]]])  # ranks, slots, phases
    assert step_time_s(phases_s, "step") == 6.0
    assert step_time_s(phases_s, "microbatch") == 3.0 + 3.0
    assert step_time_s(phases_s, "phase") == (2.0 + 2.0) + (3.0 + 1.0)


@pytest.mark.parametrize(
    ("num_ranks", "num_slots", "batch_size"), [(2, 1, 3), (2, 4, 2), (4, 2, 1), (1, 3, 2)]
)
def test_blind_bins_are_those_of_a_sharded_batch_sampler(num_ranks, num_slots, batch_size):
    num_samples = num_ranks * num_slots * batch_size
    step = make_step([1] * num_samples, num_ranks=num_ranks, num_slots=num_slots)
    bins = blind_bins(step)
    for rank in range(num_ranks):
        inner = BatchSampler(range(num_samples), batch_size, drop_last=False)
        shard = BatchSamplerShard(inner, num_processes=num_ranks, process_index=rank)
        assert [list(b) for b in bins[rank * num_slots : (rank + 1) * num_slots]] == list(shard)


def test_a_small_last_batch_is_spread():
    bins = blind_bins(make_step([1] * 3, num_ranks=4, num_slots=1))
    assert bins == ((0,), (1,), (2,), ())


def test_placement_pairs_heavy_and_light_groups_where_ranks_wait_once_per_step():
    step = make_step([9, 8, 2, 1], num_ranks=2, num_slots=2)
    bins = place_bins(step, [[0], [1], [2], [3]], np.array([9.0, 8.0, 2.0, 1.0]))
    assert bins == ((0,), (3,), (1,), (2,))


def test_placement_gives_a_slot_groups_of_similar_cost_where_ranks_wait_per_microbatch():
    step = make_step([9, 8, 2, 1], num_ranks=2, num_slots=2, sync="microbatch")
    bins = place_bins(step, [[0], [1], [2], [3]], np.array([9.0, 8.0, 2.0, 1.0]))
    assert bins == ((0,), (2,), (1,), (3,))


@pytest.mark.parametrize("seed", range(8))
def test_runs_have_the_least_largest_cost(seed):
    rng = np.random.default_rng(seed)
    tokens, inputs = rng.integers(1, 50, 9), rng.integers(0, 3, 9)
    step = make_step(tokens, inputs, num_ranks=3)
    order = np.lexsort((-inputs, -tokens))

    def largest(edges):
        runs = [order[a:b] for a, b in itertools.pairwise((0, *edges, 9))]
        return max(tokens[run].max() * len(run) + 10 * inputs[run].sum() for run in runs)

    best = min(largest(edges) for edges in itertools.combinations(range(1, 9), 2))
    groups = contiguous_groups(step, COST)
    found = max(tokens[run].max() * len(run) + 10 * inputs[run].sum() for run in groups)
    assert len(groups) == 3
    assert sorted(np.concatenate(groups).tolist()) == list(range(9))
    assert found == best


def test_bad_steps_are_refused():
    with pytest.raises(SchedulingError, match="sync point"):
        make_step([1], sync="never")
    with pytest.raises(SchedulingError, match="non-negative"):
        make_step([1, -1])
