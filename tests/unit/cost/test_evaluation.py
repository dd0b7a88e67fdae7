"""Held-out errors, the alternatives and the quantiles, on rows drawn from a known truth."""

import json

import numpy as np
import pytest

from dflop_ds import flops
from dflop_ds.cost.alternatives import ThroughputInterpolation, TreesAlone, fit_predictors, prior_alone
from dflop_ds.cost.evaluation import (
    coverage,
    cross_calibrated,
    cross_validate,
    error_table,
    error_without_noise,
    predict_stages,
    summarise_errors,
)
from dflop_ds.cost.features import MicrobatchFeatures, ProfileRow
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.quantiles import StageQuantiles, measured_stages, whole_microbatches
from dflop_ds.errors import CostModelError

DIMS = flops.ModelDims(flops.VisionDims(64, 128, 4, 3, 70, 14), flops.LlmDims(96, 256, 4, 2, 24, 4, 512))
STAGES = [["vision_embed", "vision_block", "vision_block", "projector"], ["decoder_block"] * 3 + ["head"]]
KINDS = ("vision_embed", "vision_block", "projector", "decoder_block", "head")


def draw(num, seed, scale=1, noise=0.05):
    """Profile rows of `num` microbatches with log-normal noise; a quarter has no media."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num):
        lengths = rng.integers(30, 900, rng.integers(1, 5)) * scale
        tiles = 0 if number % 4 == 0 else int(rng.integers(1, 40)) * scale
        tokens, squares = int(lengths.sum()), int((lengths.astype(float) ** 2).sum())
        sizes = (tiles, 25 * tiles, tokens, squares, len(lengths), tokens // 3)
        for kind in KINDS:
            if tiles == 0 and kind in ("vision_embed", "vision_block", "projector"):
                continue
            work = {
                "decoder_block": 2e-6 * tokens + 2e-9 * squares + 1e-4,
                "head": 1e-6 * (tokens // 3) + 5e-5,
            }.get(kind, 4e-5 * tiles + 1e-4)
            times = work * np.array([1.0, 2.0]) * np.exp(noise * rng.standard_normal(2))
            rows.append(ProfileRow(kind, *sizes, *times.tolist()))
    return rows


def stage_samples(num, seed, noise):
    rows = draw(num, seed, noise=noise)
    return measured_stages(whole_microbatches(rows), STAGES)


def test_errors_of_known_numbers():
    summary = summarise_errors(np.array([1.1, 0.8, 7.0]), np.array([1.0, 1.0, 0.0]))
    assert summary.num == 2
    assert summary.mape == pytest.approx(0.15)
    assert summary.largest == pytest.approx(0.2)
    assert summary.bias == pytest.approx(-0.05)


@pytest.mark.parametrize("measured", [[0.0, 0.0], [1.0, float("nan")]])
def test_errors_need_finite_times(measured):
    with pytest.raises(CostModelError, match="finite times"):
        summarise_errors(np.array([1.0, 1.0]), np.array(measured))


def test_noise_of_the_measurements_is_taken_out():
    rng = np.random.default_rng(0)
    true_s = np.exp(rng.normal(size=(4000, 2)))
    runs_s = true_s * np.exp(0.10 * rng.standard_normal((4, 4000, 2)))
    assert error_without_noise(1.03 * true_s, runs_s) == pytest.approx(np.log(1.03), rel=0.1)
    scattered_s = true_s * np.exp(0.05 * rng.standard_normal(true_s.shape))
    assert error_without_noise(scattered_s, runs_s) == pytest.approx(0.05, rel=0.1)
    assert error_without_noise(true_s, runs_s) < 0.01


def test_interpolation_finds_throughputs_that_follow_size_and_length():
    """Attention and the other work of a block each have a throughput of their own, growing with its size."""
    rng = np.random.default_rng(1)
    lengths = [rng.integers(20, 900, rng.integers(1, 6)) for _ in range(300)]
    rows = []
    for segments in lengths:
        tokens, squares = int(segments.sum()), int((segments**2).sum())
        linear = flops.decoder_linear_flops(DIMS.llm, tokens) / (1e9 * (1 + tokens / 1000))
        attention = flops.decoder_attention_flops(DIMS.llm, squares) / (2e8 * (1 + squares / tokens / 500))
        rows.append(
            ProfileRow(
                "decoder_block", 0, 0, tokens, squares, len(segments), 1, linear + attention, 2 * linear
            )
        )
    found = ThroughputInterpolation(rows[:200], DIMS)
    held = MicrobatchFeatures.from_rows(rows[200:])
    measured_s = np.array([row.forward_s for row in rows[200:]])
    assert summarise_errors(found.predict("decoder_block", held)[0], measured_s).mape < 0.03


def test_coverage_counts_positive_measurements_only():
    assert coverage(np.array([1.0, 1.0, 0.0]), np.array([0.9, 1.1, 0.0])) == 0.5


def test_the_cost_model_beats_what_it_should_beat():
    predictors = fit_predictors(draw(120, 1), DIMS)
    features, measured_s = stage_samples(60, 2, noise=0.0)
    error = {
        name: summarise_errors(predict_stages(p, STAGES, features).ravel(), measured_s.ravel()).mape
        for name, p in predictors.items()
    }
    assert error["cost model"] < 0.02
    assert error["cost model"] < error["throughput interpolation"] / 2
    assert error["cost model"] < error["trees alone"] / 2
    outside = MicrobatchFeatures.from_rows([g[0] for g in whole_microbatches(draw(40, 3, scale=2))])
    _, truth_s = measured_stages(whole_microbatches(draw(40, 3, scale=2, noise=0.0)), STAGES)
    doubled = predict_stages(predictors["cost model"], STAGES, outside)
    assert summarise_errors(doubled.ravel(), truth_s.ravel()).mape < 0.05


def test_alternatives_predict_nothing_for_no_work():
    rows = draw(80, 4)
    empty = MicrobatchFeatures(*(np.array([value]) for value in (0, 0, 100, 10000, 1, 30)))
    for predictor in (ThroughputInterpolation(rows, DIMS), TreesAlone(rows)):
        assert predictor.predict("vision_block", empty)[0] == pytest.approx([0.0])
    model = LayerCostModel().fit(rows, DIMS)
    assert not prior_alone(model).trees_


def test_trees_alone_of_few_rows_are_one_leaf():
    rows = draw(20, 5)
    features = MicrobatchFeatures.from_rows([row for row in rows if row.kind == "head"])
    times_s = fit_predictors(rows, DIMS)["trees alone"].predict("head", features)[0]
    assert len(set(times_s.tolist())) == 1


def test_cross_validation_and_its_table():
    held_out = cross_validate(draw(100, 6), DIMS, STAGES)
    assert set(held_out.measured_s) == {*KINDS, "stage 0", "stage 1"}
    own = summarise_errors(held_out.predicted_s["cost model"]["stage 1"], held_out.measured_s["stage 1"])
    assert own.num == 100
    assert own.mape < 0.06
    lines = error_table(held_out)
    assert len(lines) == 1 + len(held_out.measured_s)
    assert len({len(line) for line in lines}) == 1
    assert "throughput interpolation" in lines[0]


def test_cross_validation_needs_whole_microbatches():
    with pytest.raises(CostModelError, match="at least 8 microbatches"):
        cross_validate(draw(6, 7), DIMS, STAGES)


def test_p50_and_p90_cover_what_they_say():
    rows = draw(240, 8, noise=0.1)
    model = LayerCostModel().fit(rows, DIMS)
    quantiles = StageQuantiles().fit(rows, DIMS, STAGES)
    features, measured_s = stage_samples(300, 9, noise=0.1)
    for level in (0.5, 0.9):
        upper_s = quantiles.predict(model, features, level)
        assert coverage(upper_s.ravel(), measured_s.ravel()) == pytest.approx(level, abs=0.07)


def test_calibration_on_whole_stages():
    rows = draw(60, 10, noise=0.1)
    model = LayerCostModel().fit(rows, DIMS)
    quantiles = StageQuantiles().fit(rows, DIMS, STAGES)
    features, measured_s = stage_samples(80, 11, noise=0.01)
    test_features, test_s = stage_samples(200, 12, noise=0.01)
    assert coverage(quantiles.predict(model, test_features, 0.9).ravel(), test_s.ravel()) > 0.97
    quantiles.calibrate(model, features, measured_s)
    covered = coverage(quantiles.predict(model, test_features, 0.9).ravel(), test_s.ravel())
    assert covered == pytest.approx(0.9, abs=0.06)


def test_every_microbatch_is_covered_by_what_the_others_calibrate():
    rows = draw(60, 19, noise=0.1)
    model = LayerCostModel(warn=False).fit(rows, DIMS)
    quantiles = StageQuantiles().fit(rows, DIMS, STAGES)
    before = quantiles.to_dict()
    features, true_s = stage_samples(60, 20, noise=0.0)
    runs_s = true_s * np.exp(0.05 * np.random.default_rng(3).standard_normal((4, *true_s.shape)))
    for level in (0.5, 0.9):
        upper_s = cross_calibrated(quantiles, model, features, runs_s, level)
        assert coverage(upper_s, runs_s) == pytest.approx(level, abs=0.03)
    assert quantiles.to_dict() == before
    runs_s[:, :, 1] *= np.where(np.arange(60) == 7, 100.0, 1.0)
    apart_s = cross_calibrated(quantiles, model, features, runs_s, 0.9)
    np.testing.assert_array_equal(apart_s[2::5], upper_s[2::5], "its own fold is calibrated without it")
    assert (apart_s[0::5, 1] >= upper_s[0::5, 1]).all()


def test_quantiles_are_ordered_and_more_work_is_never_cheaper():
    rows = draw(240, 13, noise=0.1)
    model = LayerCostModel(warn=False).fit(rows, DIMS)
    quantiles = StageQuantiles().fit(rows, DIMS, STAGES)
    steps = np.arange(1, 60, dtype=float)
    features = MicrobatchFeatures(
        steps, 25 * steps, 60 * steps, 3600 * steps * steps, np.ones(59), 20 * steps
    )
    p90_s = quantiles.predict(model, features, 0.9)
    assert (np.diff(p90_s, axis=0) >= 0).all()
    assert (p90_s > 0).all()
    assert (p90_s > quantiles.predict(model, features, 0.5)).mean() > 0.9


def test_quantiles_survive_json():
    rows = draw(240, 14)
    model = LayerCostModel().fit(rows, DIMS)
    quantiles = StageQuantiles().fit(rows, DIMS, STAGES)
    loaded = StageQuantiles.from_dict(json.loads(json.dumps(quantiles.to_dict())))
    features, _ = stage_samples(50, 15, noise=0.0)
    assert (loaded.predict(model, features) == quantiles.predict(model, features)).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.update(schema_version=9), "Upgrade dflop_ds"),
        (lambda content: content.pop("spreads"), "spreads"),
        (lambda content: content["spreads"][0].pop("shift"), "shift"),
    ],
)
def test_damaged_quantiles(damage, message):
    content = StageQuantiles().fit(draw(40, 16), DIMS, STAGES).to_dict()
    damage(content)
    with pytest.raises(CostModelError, match=message):
        StageQuantiles.from_dict(content)


def test_levels_are_checked():
    rows = draw(40, 17)
    with pytest.raises(CostModelError, match="between 0 and 1"):
        StageQuantiles().fit(rows, DIMS, STAGES, (1.0,))
    quantiles = StageQuantiles().fit(rows, DIMS, STAGES, (0.9,))
    features, measured_s = stage_samples(8, 18, noise=0.0)
    model = LayerCostModel().fit(rows, DIMS)
    with pytest.raises(CostModelError, match="one of the fitted"):
        quantiles.predict(model, features, 0.8)
    with pytest.raises(CostModelError, match="at least 10"):
        quantiles.calibrate(
            model, MicrobatchFeatures(*(column[:4] for column in vars(features).values())), measured_s[:4]
        )
