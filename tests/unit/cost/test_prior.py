"""Non-negative fit of the analytic terms."""

import numpy as np
import pytest

from dflop_ds import flops
from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.cost.prior import AnalyticPrior, prior_terms
from dflop_ds.errors import CostModelError
from tests.support.kinds import NATIVE_KINDS, TILED_KINDS

DIMS = flops.ModelDims(
    flops.VisionDims(1152, 4304, 16, 26, 384, 14), flops.LlmDims(896, 4864, 14, 2, 64, 24, 152000)
)
NATIVE_DIMS = flops.ModelDims(flops.NativeVisionDims(1280, 3420, 16, 32, 14, 2, 2, (7, 15, 23, 31)), DIMS.llm)

AUDIO_DIMS = flops.ModelDims(flops.AudioDims(1280, 5120, 20, 32, 128), DIMS.llm)
AUDIO_KINDS = ("vision_embed", "vision_frame_block", "projector")


def microbatches(num_rows, seed=0, scale=1):
    """Of one scale for every size, so that far ones lie outside of all ranges."""
    rng = np.random.default_rng(seed)
    frames = [rng.integers(16, 4096, rng.integers(1, 4)) * scale for _ in range(num_rows)]
    segments = [rng.integers(32, 4096, rng.integers(1, 9)) * scale for _ in range(num_rows)]
    tokens = np.array([segment.sum() for segment in segments])
    return MicrobatchFeatures(
        encoder_inputs=rng.integers(1, 64, num_rows) * scale,
        media_tokens=tokens // rng.integers(2, 9, num_rows),
        llm_tokens=tokens,
        sum_squared_tokens=np.array([(segment**2).sum() for segment in segments]),
        num_segments=np.array([len(segment) for segment in segments]),
        target_tokens=tokens // rng.integers(2, 9, num_rows),
        sum_squared_windows=np.array([(64 * frame).sum() - 40 * len(frame) for frame in frames]),
        sum_squared_frames=np.array([(frame**2).sum() for frame in frames]),
    )


def true_time_s(kind, features, dims=DIMS):
    speeds = {"flops": 3e14, "attention_flops": 1e14, "bytes": 2e12, "segments": 1e5}
    terms = prior_terms(kind, "forward", features, dims)
    return 3e-5 + sum(term / speeds[name] for name, term in terms.items())


@pytest.mark.parametrize(
    ("kind", "dims"),
    [(kind, DIMS) for kind in TILED_KINDS]
    + [(kind, NATIVE_DIMS) for kind in NATIVE_KINDS]
    + [(kind, AUDIO_DIMS) for kind in AUDIO_KINDS],
)
def test_recovers_the_truth_and_extrapolates(kind, dims):
    train = microbatches(60)
    prior = AnalyticPrior(kind, "forward", dims).fit(train, true_time_s(kind, train, dims))
    far = microbatches(40, seed=1, scale=8)
    np.testing.assert_allclose(prior.predict(far), true_time_s(kind, far, dims), rtol=1e-6)
    assert prior.coefficients_["overhead"] == pytest.approx(3e-5)


def test_kinds_of_another_encoder_are_refused():
    with pytest.raises(CostModelError, match="a VisionDims encoder must be of kind"):
        prior_terms("vision_window_block", "forward", microbatches(2), DIMS)
    with pytest.raises(CostModelError, match="NativeVisionDims encoder must be of kind"):
        prior_terms("vision_block", "forward", microbatches(2), NATIVE_DIMS)


def test_noise_is_averaged_out():
    train = microbatches(200)
    noise = np.exp(0.05 * np.random.default_rng(2).normal(size=200))
    prior = AnalyticPrior("decoder_block", "forward", DIMS)
    prior.fit(train, true_time_s("decoder_block", train) * noise)
    for scale, limit in ((1, 0.02), (8, 0.10)):
        probe = microbatches(100, seed=1, scale=scale)
        error = np.abs(prior.predict(probe) / true_time_s("decoder_block", probe) - 1)
        assert error.mean() < limit


def test_small_rows_count_as_much_as_large_ones():
    train = microbatches(60)
    prior = AnalyticPrior("norm", "forward", DIMS)
    time_s = 1e-5 + flops.copy_bytes(train.llm_tokens, 896) / 2e12
    slowest = time_s.argmax()
    time_s[slowest] *= 1.2
    expected = np.delete(time_s, slowest)
    error = np.abs(np.delete(prior.fit(train, time_s).predict(train), slowest) / expected - 1)
    assert error.mean() < 0.02


def test_coefficients_are_never_negative():
    train = microbatches(30)
    falling = 1.0 / train.llm_tokens
    prior = AnalyticPrior("decoder_block", "forward", DIMS).fit(train, falling)
    assert min(prior.coefficients_.values()) >= 0


def test_indistinguishable_terms_stay_out():
    # One segment in every row: the segment term equals the launch overhead.
    tokens = np.arange(1.0, 31.0) * 100
    one = np.ones(30)
    train = MicrobatchFeatures(one, one, tokens, tokens**2, one, tokens)
    prior = AnalyticPrior("decoder_block", "forward", DIMS).fit(train, 1e-4 + 1e-7 * tokens)
    assert prior.coefficients_["segments"] == 0
    assert prior.coefficients_["overhead"] == pytest.approx(1e-4)


def test_backward_terms_are_twice_forward():
    train = microbatches(5)
    forward = prior_terms("head", "forward", train, DIMS)
    backward = prior_terms("head", "backward", train, DIMS)
    for name, term in forward.items():
        np.testing.assert_array_equal(backward[name], 2 * term)


def test_all_zero_times_predict_zero():
    train = microbatches(10)
    prior = AnalyticPrior("vision_embed", "backward", DIMS).fit(train, np.zeros(10))
    assert not prior.predict(train).any()


def test_overhead_share():
    train = microbatches(60)
    prior = AnalyticPrior("norm", "forward", DIMS).fit(train, true_time_s("norm", train))
    saved_s = prior.predict(train) - prior.predict(train, overhead_share=0.25)
    np.testing.assert_allclose(saved_s, 0.75 * prior.coefficients_["overhead"], rtol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_bad_times_are_refused(bad):
    time_s = np.ones(10)
    time_s[3] = bad
    with pytest.raises(CostModelError, match="forward times of 'norm'"):
        AnalyticPrior("norm", "forward", DIMS).fit(microbatches(10), time_s)


def test_one_size_is_refused():
    same = MicrobatchFeatures(*(np.full(5, 8.0) for _ in range(6)))
    with pytest.raises(CostModelError, match="two or more sizes, found 1"):
        AnalyticPrior("norm", "forward", DIMS).fit(same, np.ones(5))


def test_unfitted_and_damaged():
    with pytest.raises(CostModelError, match="Call fit"):
        AnalyticPrior("norm", "forward", DIMS).predict(microbatches(2))
    for damaged in ({"overhead": 1.0}, {"overhead": 1.0, "bytes": -1.0}, {"overhead": 1.0, "bytes": np.nan}):
        with pytest.raises(CostModelError, match="coefficients"):
            AnalyticPrior.from_coefficients("norm", "forward", DIMS, damaged)
    with pytest.raises(CostModelError, match="layer kind"):
        prior_terms("mlp", "forward", microbatches(2), DIMS)
