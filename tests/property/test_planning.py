"""What must hold for every layout."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop_ds.cost.gradients import layer_training
from dflop_ds.planning.analytic import model_layers
from dflop_ds.planning.candidates import enumerate_layouts
from dflop_ds.planning.evaluation import Evaluator
from dflop_ds.planning.layout import SearchSpace
from dflop_ds.planning.scoring import Scorer
from dflop_ds.planning.stages import StageTable
from tests.support.planning import DIMS, mixed_table, small_workload


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    num_gpus=st.sampled_from([1, 2, 4, 6, 8, 16]),
    batch_size=st.sampled_from([8, 12, 24, 48]),
    data=st.data(),
)
def test_bounds_hold_for_every_layout(seed, num_gpus, batch_size, data):
    layers = model_layers(DIMS)
    trained = [data.draw(st.sampled_from([0, 1, 10])) for _ in layers]
    training = data.draw(st.sampled_from([None, layer_training(trained, [10] * len(layers))]))
    stages = StageTable(small_workload(mixed_table(60, seed), batch_size, seed=seed, training=training))
    candidates = enumerate_layouts(stages, SearchSpace(num_gpus, ("uniform", "separate"), 8))
    scores = Scorer(stages).scores(candidates)
    index = data.draw(st.integers(0, len(candidates) - 1))
    layout = candidates.layout(index)
    assert layout.num_gpus == num_gpus
    found = Evaluator(stages).evaluate(layout)
    assert scores.bound_s[index] <= found.step_s * (1 + 1e-9)
    assert scores.least_bytes[index] <= found.peak_bytes * (1 + 1e-9)
    assert scores.least_bytes[index] <= scores.expected_bytes[index] * (1 + 1e-9)
    assert sum(found.sizes) == len(stages.workload.layers)
    assert len(found.sizes) == layout.num_stages


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    tensor=st.sampled_from([1, 2, 4]),
    checkpointing=st.booleans(),
    profile=st.booleans(),
    bins=st.integers(1, 24),
)
def test_totals_are_sums_of_sample_costs(seed, tensor, checkpointing, profile, bins):
    workload = small_workload(mixed_table(60, seed), 24, seed=seed, profiled_checkpointing=profile)
    costs = workload.layer_costs(tensor, checkpointing, bins)
    totals = workload.layer_totals(np.array([tensor]), checkpointing, np.array([bins]))[0]
    summed = (costs.forward_s + costs.backward_s).sum(axis=2).mean(axis=1)
    assert (totals <= summed * (1 + 1e-9)).all()
    if checkpointing or not profile:
        np.testing.assert_allclose(totals, summed, rtol=1e-9)
