"""Step time of data-parallel ranks, data-blind bins, placement, runs of similar length."""

from __future__ import annotations

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from dflop_ds.errors import SchedulingError
from dflop_ds.scheduling.rank_step import RankStep, blind_bins, place_bins, step_time_s


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


def test_bad_steps_are_refused():
    with pytest.raises(SchedulingError, match="sync point"):
        make_step([1], sync="never")
    with pytest.raises(SchedulingError, match="non-negative"):
        make_step([1, -1])
