"""Costs of whole microbatches: sizes with padding, phases, fits to measured times."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes, fit_microbatch_cost
from dflop_ds.errors import CostModelError

TRUE = MicrobatchCost(token_s=2e-5, squared_token_s=3e-9, encoder_input_s=4e-3, overhead_s=1e-2)


def draw_sizes(shape, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.uniform(100, 4000, shape)
    return MicrobatchSizes(
        tokens, tokens**2 / rng.uniform(1, 8, shape), rng.integers(0, 30, shape).astype(float)
    )


def total_s(cost, sizes):
    return (
        cost.overhead_s
        + cost.token_s * sizes.tokens
        + cost.squared_token_s * sizes.squared_tokens
        + cost.encoder_input_s * sizes.encoder_inputs
    )


def test_sizes_of_padded_and_packed_bins():
    tokens, inputs = np.array([10.0, 4.0, 6.0]), np.array([1.0, 0.0, 5.0])
    bins = [(0, 1), (2,), ()]
    padded = MicrobatchSizes.from_bins(tokens, inputs, bins, padded=True)
    assert padded.tokens.tolist() == [20, 6, 0]
    assert padded.squared_tokens.tolist() == [200, 36, 0]
    packed = MicrobatchSizes.from_bins(tokens, inputs, bins, padded=False)
    assert packed.tokens.tolist() == [14, 6, 0]
    assert packed.squared_tokens.tolist() == [116, 36, 0]
    assert packed.encoder_inputs.tolist() == padded.encoder_inputs.tolist() == [1, 5, 0]


def test_phases_add_up_and_samples_leave_the_overhead_out():
    sizes = draw_sizes((4, 3))
    phases_s = TRUE.phases_s(sizes)
    assert phases_s.shape == (4, 3, 2)
    assert phases_s.sum(axis=-1) == pytest.approx(total_s(TRUE, sizes))
    assert phases_s[..., 0] == pytest.approx(4e-3 * sizes.encoder_inputs)
    assert TRUE.sample_s(np.array([10.0]), np.array([2.0])) == pytest.approx(2e-4 + 3e-7 + 8e-3)


def test_fit_recovers_costs_and_is_not_moved_by_a_few_slow_passes():
    sizes = draw_sizes((16, 2))
    measured_s = total_s(TRUE, sizes)
    measured_s[3, 0] *= 10
    fitted = fit_microbatch_cost(sizes, measured_s, waits_for_slowest=False)
    assert fitted.to_dict() == pytest.approx(TRUE.to_dict(), rel=1e-6)


def test_fit_finds_the_rank_that_others_wait_for():
    sizes = draw_sizes((40, 4), seed=3)
    alone_s = total_s(TRUE, sizes)
    measured_s = np.repeat(alone_s.max(axis=1, keepdims=True), 4, axis=1)
    fitted = fit_microbatch_cost(sizes, measured_s, waits_for_slowest=True)
    assert total_s(fitted, sizes).max(axis=1) == pytest.approx(measured_s[:, 0], rel=0.02)


@pytest.mark.parametrize(
    ("measured_s", "message"),
    [(np.ones((2, 2)), "8 or more"), (np.zeros((9, 1)), "positive"), (np.full((9, 1), np.nan), "positive")],
)
def test_unusable_measurements_are_named(measured_s, message):
    with pytest.raises(CostModelError, match=message):
        fit_microbatch_cost(draw_sizes(measured_s.shape), measured_s, waits_for_slowest=False)


def test_equal_sizes_cannot_be_fitted():
    same = MicrobatchSizes(*(np.full((9, 1), 5.0) for _ in range(3)))
    with pytest.raises(CostModelError, match="depends on the size"):
        fit_microbatch_cost(same, np.ones((9, 1)), waits_for_slowest=False)


def test_file_round_trip_and_damage(tmp_path):
    path = tmp_path / "cost.json"
    TRUE.save(path)
    assert MicrobatchCost.load(path) == TRUE
    path.write_text('{"schema_version": 1, "token_s": 1}')
    with pytest.raises(CostModelError, match="complete"):
        MicrobatchCost.load(path)
    with pytest.raises(CostModelError, match="non-negative"):
        MicrobatchCost(-1.0, 0.0, 0.0, 0.0)


def test_scaled_multiplies_llm_and_encoder():
    scaled = TRUE.scaled(llm=3.0, encoder=1.0)
    assert (scaled.token_s, scaled.encoder_input_s, scaled.overhead_s) == pytest.approx((6e-5, 4e-3, 3e-2))
