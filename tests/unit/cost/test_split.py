"""Balanced contiguous splits against every possible split."""

import itertools

import numpy as np
import pytest

from dflop_ds.cost.split import balanced_split, expected_layer_times
from dflop_ds.errors import CostModelError


def brute_force(times, num_stages):
    """Best (stage times from slowest to fastest, boundaries) over all splits; whole-number times."""
    splits = []
    for cuts in itertools.combinations(range(1, len(times)), num_stages - 1):
        boundaries = [0, *cuts, len(times)]
        stages = sorted((sum(times[a:b]) for a, b in itertools.pairwise(boundaries)), reverse=True)
        splits.append((stages, boundaries))
    return min(splits)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 11))
    num_stages = int(rng.integers(1, num_layers + 1))
    times = rng.integers(0, int(rng.choice([3, 10, 1000])), num_layers).tolist()
    # Times are compared as 2^40ths of their sum: a power of two as sum makes that exact.
    times[0] += (1 << sum(times).bit_length()) - sum(times)
    kinds = ["decoder_block"] * num_layers
    assert balanced_split(kinds, times, num_stages) == brute_force(times, num_stages)[1]


@pytest.mark.parametrize("seed", range(20))
def test_slowest_stage_is_smallest_for_real_times(seed):
    rng = np.random.default_rng(seed)
    times = rng.exponential(size=9)
    boundaries = balanced_split(["norm"] * 9, times, 4)
    slowest = max(times[a:b].sum() for a, b in itertools.pairwise(boundaries))
    assert slowest == pytest.approx(brute_force(times.tolist(), 4)[0][0], rel=1e-9)


def test_equal_layers_split_evenly():
    assert balanced_split(["decoder_block"] * 28, [0.1] * 28, 4) == [0, 7, 14, 21, 28]


def test_second_slowest_decides_ties():
    # The slowest stage is 8 either way; the second slowest can be 5 instead of 6.
    assert balanced_split(["norm"] * 4, [8, 3, 3, 2], 3) == [0, 1, 2, 4]
    assert balanced_split(["norm"] * 4, [8, 2, 3, 3], 3) == [0, 1, 3, 4]


def test_no_time_at_all():
    assert balanced_split(["norm"] * 3, [0, 0, 0], 2) == [0, 1, 3]


def test_one_layer_per_stage():
    assert balanced_split(["norm"] * 3, [5, 1, 1], 3) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("times", "num_stages", "message"),
    [
        ([1, 1], 3, "num_stages=3 for 2 layers"),
        ([1, 1], 0, "num_stages=0"),
        ([1, np.nan], 1, "layer 1 .head"),
        ([-1, 1], 1, "layer 0 .norm"),
        ([1, 1, 1], 1, "2 layers"),
    ],
)
def test_refusals(times, num_stages, message):
    with pytest.raises(CostModelError, match=message):
        balanced_split(["norm", "head"], times, num_stages)


def test_expected_layer_times_predicts_once_per_kind():
    class Model:
        def __init__(self):
            self.calls = []

        def predict(self, kind, features):
            self.calls.append(kind)
            return np.array([1.0, 3.0]), np.array([2.0, 4.0])

    model = Model()
    times = expected_layer_times(model, ["norm", "head", "norm"], [None, None])
    np.testing.assert_array_equal(times, [5.0, 5.0, 5.0])
    assert model.calls == ["norm", "head"]
    with pytest.raises(CostModelError, match="at least one microbatch"):
        expected_layer_times(model, ["norm"], [])
