"""Layer and stage predictions, on rows drawn from a known formula with noise."""

import functools
import json
import logging
import time

import numpy as np
import pytest

from dflop_ds import flops
from dflop_ds.cost.features import ENCODER_KINDS, MicrobatchFeatures, feature_names
from dflop_ds.cost.model import CostModel, LayerCostModel, ProfileRow
from dflop_ds.errors import CostModelError
from dflop_ds.shapes import SampleShape, ShapeTable
from tests.support.kinds import TILED_KINDS

DIMS = flops.ModelDims(
    flops.VisionDims(1152, 4304, 16, 26, 384, 14), flops.LlmDims(3584, 18944, 28, 4, 128, 28, 152064)
)
SIZES = (
    "encoder_inputs",
    "media_tokens",
    "llm_tokens",
    "sum_squared_tokens",
    "num_segments",
    "target_tokens",
)
STAGES = [
    ["vision_embed"] + ["vision_block"] * 26 + ["projector"],
    ["token_embed"] + ["decoder_block"] * 12,
    ["decoder_block"] * 16 + ["norm", "head"],
]


def true_time_s(kind, f):
    """Roofline with a launch floor, so that the affine prior is not the whole truth."""
    if kind == "vision_embed":
        return 2e-5 + flops.vision_embed_flops(DIMS.vision, f.encoder_inputs) / 2e14
    if kind == "vision_block":
        return np.maximum(1.5e-4, flops.vision_block_flops(DIMS.vision, f.encoder_inputs) / 3.5e14)
    if kind == "projector":
        return 3e-5 + flops.projector_flops(DIMS, f.encoder_inputs) / 3.5e14
    if kind == "decoder_block":
        linear_s = np.maximum(2e-4, flops.decoder_linear_flops(DIMS.llm, f.llm_tokens) / 4.5e14)
        attention_s = flops.decoder_attention_flops(DIMS.llm, f.sum_squared_tokens) / 2.5e14
        return linear_s + attention_s + 1e-5 * f.num_segments
    if kind == "head":
        return 5e-5 + flops.head_flops(DIMS.llm, f.target_tokens) / 4e14
    return 1e-5 + flops.copy_bytes(f.llm_tokens, DIMS.llm.hidden) / 3e12


def microbatches(num_rows, seed, scale=1):
    rng = np.random.default_rng(seed)
    segments = [
        np.exp(rng.uniform(4.2, 8.3, rng.integers(1, 12))).astype(int) * scale for _ in range(num_rows)
    ]
    tokens = np.array([segment.sum() for segment in segments])
    encoder_inputs = rng.integers(1, 100, num_rows) * scale
    return MicrobatchFeatures(
        encoder_inputs=encoder_inputs,
        media_tokens=np.minimum(encoder_inputs * 200, tokens),
        llm_tokens=tokens,
        sum_squared_tokens=np.array([(segment**2).sum() for segment in segments]),
        num_segments=np.array([len(segment) for segment in segments]),
        target_tokens=(tokens * rng.uniform(0.1, 0.9, num_rows)).astype(int),
    )


def profile_rows(num_rows, noise=0.02, kinds=TILED_KINDS, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for kind in kinds:
        features = microbatches(num_rows, seed)
        base_s = true_time_s(kind, features)
        forward_s = base_s * np.exp(noise * rng.normal(size=num_rows))
        backward_s = 2 * base_s * np.exp(noise * rng.normal(size=num_rows))
        for i in range(num_rows):
            sizes = (int(getattr(features, name)[i]) for name in SIZES)
            rows.append(ProfileRow(kind, *sizes, float(forward_s[i]), float(backward_s[i])))
    return rows


@functools.cache
def fitted():
    return LayerCostModel().fit(profile_rows(200), DIMS)


def samples(num_samples, seed=0):
    rng = np.random.default_rng(seed)
    text = rng.integers(20, 2000, num_samples)
    tiles = rng.integers(1, 10, num_samples) * (rng.random(num_samples) < 0.7)
    frames = rng.integers(1, 33, num_samples) * (rng.random(num_samples) < 0.2)
    columns = {
        "num_tiles": tiles,
        "num_frames": frames,
        "text_tokens": text,
        "llm_tokens": text + 400 * tiles + 196 * frames,
        "target_tokens": text // 2,
    }
    return ShapeTable([str(i) for i in range(num_samples)], columns)


def random_bins(num_samples, num_bins, seed=0):
    order = np.random.default_rng(seed).permutation(num_samples)
    return [part.tolist() for part in np.array_split(order, num_bins)]


def test_features_of_shapes_and_bins():
    table = ShapeTable.from_shapes([SampleShape("a", 2, 1, 10, 40, 5), SampleShape("b", 0, 0, 20, 20, 7)])
    alone = MicrobatchFeatures.from_shapes(table)
    np.testing.assert_array_equal(alone.encoder_inputs, [3, 0])
    np.testing.assert_array_equal(alone.media_tokens, [30, 0])
    np.testing.assert_array_equal(alone.sum_squared_tokens, [1600, 400])
    packed = MicrobatchFeatures.from_bins(table, [[1, 0], [], [0]])
    np.testing.assert_array_equal(packed.matrix("decoder_block"), [[60, 2000, 2], [0, 0, 0], [40, 1600, 1]])
    np.testing.assert_array_equal(packed.matrix("head"), [[60, 12], [0, 0], [40, 5]])
    assert feature_names("projector") == ("encoder_inputs", "media_tokens")


def test_bad_features_are_refused():
    table = samples(3)
    for position in (-1, 3):
        with pytest.raises(CostModelError, match=f"found {position}"):
            MicrobatchFeatures.from_bins(table, [[0, position]])
    ones = [np.ones(2)] * 5
    for bad in ([1.0, np.nan], [1.0, -1.0], [1.0, np.inf], [1.0]):
        with pytest.raises(CostModelError, match="target_tokens"):
            MicrobatchFeatures(*ones, np.array(bad))


@pytest.mark.parametrize("kind", TILED_KINDS)
def test_held_out_error_is_small(kind):
    probe = microbatches(300, seed=7)
    forward_s, backward_s = fitted().predict(kind, probe)
    expected = true_time_s(kind, probe)
    assert np.mean(np.abs(forward_s / expected - 1)) < 0.03
    assert np.mean(np.abs(backward_s / (2 * expected) - 1)) < 0.03


@pytest.mark.parametrize("kind", TILED_KINDS)
def test_extrapolates_with_the_prior(kind):
    probe = microbatches(100, seed=8, scale=4)
    expected = true_time_s(kind, probe)
    assert np.mean(np.abs(fitted().predict(kind, probe)[0] / expected - 1)) < 0.15


def test_trees_correct_what_the_prior_cannot_express():
    features = microbatches(200, seed=7)
    expected = true_time_s("vision_block", features)
    prior_s = fitted().priors_["vision_block", "forward"].predict(features)
    model_s = fitted().predict("vision_block", features)[0]
    assert np.abs(model_s / expected - 1).mean() < 0.7 * np.abs(prior_s / expected - 1).mean()


def test_residual_is_held_at_the_edge():
    model = fitted()
    edge = np.array([model.ranges_["vision_block"][0][1]])
    features = [
        MicrobatchFeatures(inputs, edge, edge, edge, edge, edge) for inputs in (edge, 10 * edge, 100 * edge)
    ]
    prior = model.priors_["vision_block", "forward"]
    ratios = [model.predict("vision_block", f)[0] / prior.predict(f) for f in features]
    np.testing.assert_allclose(ratios[1:], [ratios[0]] * 2, rtol=1e-12)


def test_one_warning_per_feature(caplog):
    model = LayerCostModel().fit(profile_rows(60, kinds=["decoder_block"]), DIMS)
    inside = MicrobatchFeatures.from_rows(profile_rows(60, kinds=["decoder_block"]))
    far = microbatches(20, seed=1, scale=50)
    with caplog.at_level(logging.WARNING):
        model.predict("decoder_block", inside)
        assert not caplog.records
        model.predict("decoder_block", far)
        model.predict("decoder_block", far)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "llm_tokens of decoder_block" in messages[0]
    assert "sum_squared_tokens of decoder_block" in messages[1]


@pytest.mark.parametrize("kind", ENCODER_KINDS)
def test_no_media_costs_nothing(kind):
    none, some = np.zeros(2), np.array([500.0, 900.0])
    features = MicrobatchFeatures(none, none, some, some**2, np.ones(2), some)
    for time_s in (*fitted().predict(kind, features), *fitted().predict_marginal(kind, features, 4.0)):
        np.testing.assert_array_equal(time_s, 0.0)


def test_few_rows_use_the_prior_alone(caplog):
    with caplog.at_level(logging.INFO):
        model = LayerCostModel().fit(profile_rows(49, kinds=["norm"]), DIMS)
    assert not model.trees_
    assert "norm forward: 49 usable rows" in caplog.text
    probe = microbatches(20, seed=3)
    expected = model.priors_["norm", "forward"].predict(probe)
    np.testing.assert_array_equal(model.predict("norm", probe)[0], expected)


def test_frozen_layer_has_no_backward():
    rows = [
        ProfileRow("vision_embed", n, 0, 0, 0, 0, 0, forward_s=1e-4 + n * 1e-5, backward_s=0.0)
        for n in range(1, 80)
    ]
    forward_s, backward_s = LayerCostModel().fit(rows, DIMS).predict("vision_embed", microbatches(5, seed=0))
    assert (forward_s > 0).all() and not backward_s.any()


def test_save_and_load_predict_the_same_bits(tmp_path):
    path = tmp_path / "model.json"
    fitted().save(path)
    loaded = LayerCostModel.load(path)
    probe = microbatches(500, seed=11, scale=2)
    for kind in TILED_KINDS:
        for before, after in zip(fitted().predict(kind, probe), loaded.predict(kind, probe), strict=True):
            assert before.tobytes() == after.tobytes()
    assert loaded.to_dict() == fitted().to_dict()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.json"]


def test_fit_is_deterministic():
    rows = profile_rows(80, kinds=["decoder_block"])
    assert LayerCostModel().fit(rows, DIMS).to_dict() == LayerCostModel().fit(iter(rows), DIMS).to_dict()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.pop("dims"), "dims"),
        (lambda content: content.update(schema_version=2), "Upgrade dflop_ds"),
        (lambda content: content.update(schema_version="1"), "Write it again"),
        (lambda content: content["kinds"]["norm"].pop("forward"), "forward"),
        (lambda content: content["kinds"]["norm"].update(ranges=[]), "0 ranges"),
        (lambda content: content["kinds"].update(mlp={"ranges": []}), "mlp"),
        (lambda content: content.update(kinds=[]), "complete"),
        (lambda content: content["kinds"]["norm"]["forward"]["prior"].update(overhead=None), "complete"),
    ],
)
def test_damaged_model_is_refused(damage, message):
    content = json.loads(json.dumps(fitted().to_dict()))
    damage(content)
    with pytest.raises(CostModelError, match=message):
        LayerCostModel.from_dict(content)


def test_refusals(tmp_path):
    probe = microbatches(3, seed=0)
    with pytest.raises(CostModelError, match="Call one"):
        LayerCostModel().predict("norm", probe)
    with pytest.raises(CostModelError, match="at least one row"):
        LayerCostModel().fit([], DIMS)
    partial = LayerCostModel().fit(profile_rows(5, kinds=["norm"]), DIMS)
    with pytest.raises(CostModelError, match="rows of 'head'"):
        partial.predict("head", probe)
    with pytest.raises(CostModelError, match="layer kind"):
        partial.predict("mlp", probe)
    with pytest.raises(CostModelError, match="samples_per_bin"):
        partial.predict_marginal("norm", probe, 0.5)
    with pytest.raises(CostModelError, match="at least one stage"):
        CostModel(partial, [])
    with pytest.raises(CostModelError, match="'mlp'"):
        CostModel(partial, [["mlp"]])
    with pytest.raises(CostModelError, match="readable cost model"):
        LayerCostModel.load(tmp_path / "absent.json")


def test_stage_times_count_layers():
    probe = microbatches(10, seed=2)
    forward_s, backward_s = CostModel(fitted(), STAGES).stage_times(probe)
    for stage, kinds in enumerate(STAGES):
        expected = [
            sum(parts) for parts in zip(*(fitted().predict(kind, probe) for kind in kinds), strict=True)
        ]
        np.testing.assert_allclose(forward_s[:, stage], expected[0], rtol=1e-12)
        np.testing.assert_allclose(backward_s[:, stage], expected[1], rtol=1e-12)


@pytest.mark.parametrize("samples_per_bin", [2, 4, 8, 16])
def test_sample_costs_add_up(samples_per_bin):
    table = samples(512)
    model = CostModel(fitted(), STAGES)
    assert model.additivity_error(table, random_bins(512, 512 // samples_per_bin)) < 0.03


def test_sample_costs_beat_summing_lone_samples():
    """Short texts are bound by the launch: charging it to every sample would be far off."""
    table = ShapeTable.from_shapes([SampleShape(str(i), 0, 0, 90, 90 + i % 7, 40) for i in range(256)])
    model = CostModel(fitted(), STAGES)
    bins = random_bins(256, 32)
    together_s = np.add(*model.stage_times(MicrobatchFeatures.from_bins(table, bins)))[:, 1:]
    alone_s = np.add(*model.stage_times(MicrobatchFeatures.from_shapes(table)))[:, 1:]
    lone_error = np.mean(np.abs(np.array([alone_s[b].sum(axis=0) for b in bins]) / together_s - 1))
    assert lone_error > 0.2
    assert model.additivity_error(table, bins) < 0.02


def test_one_sample_per_bin_costs_the_whole_microbatch():
    table = samples(20)
    model = CostModel(fitted(), STAGES)
    costs = model.sample_costs(table, samples_per_bin=1.0)
    forward_s, _ = model.stage_times(MicrobatchFeatures.from_shapes(table))
    np.testing.assert_allclose(costs.forward_s, forward_s, rtol=1e-12)
    assert model.additivity_error(table, [[i] for i in range(20)]) == pytest.approx(0.0, abs=1e-12)


def test_empty_bins_and_tables():
    model = CostModel(fitted(), STAGES)
    assert model.additivity_error(samples(4), [[], []]) == 0.0
    assert model.sample_costs(samples(0)).forward_s.shape == (0, 3)
    assert model.stage_times(MicrobatchFeatures.from_bins(samples(4), []))[0].shape == (0, 3)


def test_thousands_of_samples_are_predicted_quickly():
    table = samples(4096)
    model = CostModel(fitted(), STAGES)
    elapsed_s = []
    for _ in range(5):
        start = time.process_time()
        model.sample_costs(table)
        elapsed_s.append(time.process_time() - start)
    assert min(elapsed_s) < 0.5
