"""What holds for every profile and every microbatch."""

import dataclasses
import functools
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop_ds import flops
from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.cost.model import CostModel, LayerCostModel, ProfileRow
from dflop_ds.shapes import SampleShape, ShapeTable
from tests.support.kinds import NATIVE_KINDS, TILED_KINDS

DIMS = flops.ModelDims(flops.VisionDims(64, 128, 4, 2, 56, 14), flops.LlmDims(64, 128, 4, 2, 16, 2, 256))
NATIVE_DIMS = flops.ModelDims(flops.NativeVisionDims(64, 96, 4, 2, 14, 2, 2, (1,)), DIMS.llm)
FIELDS = [field.name for field in dataclasses.fields(MicrobatchFeatures)]
STAGES = [["vision_embed", "vision_block", "projector"], ["token_embed", "decoder_block", "norm", "head"]]

sizes = st.integers(0, 10**9)
microbatches = st.lists(st.tuples(*[sizes] * len(FIELDS)), min_size=1, max_size=20)
samples = st.builds(
    SampleShape,
    sample_id=st.just("s"),
    num_tiles=st.integers(0, 40),
    num_frames=st.integers(0, 64),
    text_tokens=st.just(0),
    llm_tokens=st.integers(0, 32768),
    target_tokens=st.integers(0, 32768),
)


def features_of(rows):
    return MicrobatchFeatures(*np.array(rows, dtype=float).T)


def rows_of(kind, num_rows, rng):
    """Rows without any law: times that do not follow the sizes are the hard case."""
    rows = []
    for _ in range(num_rows):
        drawn = rng.integers(1, 10 ** rng.integers(1, 6, len(FIELDS)) + 1)
        times_s = np.exp(rng.normal(-8, 2, 2))
        row_sizes = {name: int(size) for name, size in zip(FIELDS, drawn, strict=True)}
        rows.append(
            ProfileRow(kind=kind, forward_s=float(times_s[0]), backward_s=float(times_s[1]), **row_sizes)
        )
    return rows


@functools.cache
def model_of(seed):
    rng = np.random.default_rng(seed)
    num_rows = (5, 60, 150)[seed % 3]
    dims, model_kinds = (NATIVE_DIMS, NATIVE_KINDS) if seed >= NUM_TILED else (DIMS, TILED_KINDS)
    rows = [row for kind in model_kinds for row in rows_of(kind, num_rows, rng)]
    return LayerCostModel().fit(rows, dims)


NUM_TILED = 6
# Models are fitted in the tests: a strategy that takes long fails hypothesis's own checks on a busy machine.
tiled_seeds = st.integers(0, NUM_TILED - 1)
seeds_and_kinds = st.tuples(tiled_seeds, st.sampled_from(TILED_KINDS)) | st.tuples(
    st.integers(NUM_TILED, NUM_TILED + 2), st.sampled_from(NATIVE_KINDS)
)


@settings(max_examples=150)
@given(of=seeds_and_kinds, rows=microbatches, samples_per_bin=st.floats(1, 1000))
def test_finite_and_never_negative(of, rows, samples_per_bin):
    model, kind = model_of(of[0]), of[1]
    features = features_of(rows)
    for time_s in (
        *model.predict(kind, features),
        *model.predict_marginal(kind, features, samples_per_bin),
    ):
        assert np.isfinite(time_s).all()
        assert (time_s >= 0).all()


@settings(max_examples=150)
@given(of=seeds_and_kinds, rows=microbatches, growth=microbatches)
def test_larger_never_costs_less(of, rows, growth):
    model, kind = model_of(of[0]), of[1]
    smaller = np.array(rows, dtype=float)
    larger = smaller + np.resize(np.array(growth, dtype=float), smaller.shape)
    both = MicrobatchFeatures(*np.vstack([smaller, larger]).T)
    for time_s in model.predict(kind, both):
        assert (time_s[len(rows) :] >= time_s[: len(rows)]).all()


@settings(max_examples=100)
@given(of=seeds_and_kinds, rows=microbatches)
def test_a_prediction_does_not_depend_on_its_batch(of, rows):
    model, kind = model_of(of[0]), of[1]
    together = model.predict(kind, features_of(rows))[0]
    alone = [model.predict(kind, features_of([row]))[0][0] for row in rows]
    np.testing.assert_array_equal(together, alone)


@settings(max_examples=20)
@given(seed=st.integers(0, NUM_TILED + 2), rows=microbatches)
def test_round_trip_is_bit_identical(seed, rows):
    model = model_of(seed)
    text = json.dumps(model.to_dict(), allow_nan=False)
    copy = LayerCostModel.from_dict(json.loads(text))
    assert json.dumps(copy.to_dict(), allow_nan=False) == text
    for kind in TILED_KINDS if seed < NUM_TILED else NATIVE_KINDS:
        for before, after in zip(
            model.predict(kind, features_of(rows)), copy.predict(kind, features_of(rows)), strict=True
        ):
            assert before.tobytes() == after.tobytes()


@settings(max_examples=60)
@given(seed=tiled_seeds, shapes=st.lists(samples, min_size=1, max_size=30), samples_per_bin=st.floats(1, 100))
def test_sample_costs_are_finite_and_zero_without_media(seed, shapes, samples_per_bin):
    table = ShapeTable.from_shapes(shapes)
    costs = CostModel(model_of(seed), STAGES).sample_costs(table, samples_per_bin)
    for time_s in (costs.forward_s, costs.backward_s):
        assert time_s.shape == (len(shapes), 2)
        assert np.isfinite(time_s).all() and (time_s >= 0).all()
        assert not time_s[table.encoder_inputs == 0, 0].any()
