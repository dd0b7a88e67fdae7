"""Steps of layouts, against hand-made numbers."""

import numpy as np
import pytest

from dflop_ds.planning.analytic import analytic_layer_model
from dflop_ds.planning.evaluation import Evaluator
from dflop_ds.planning.hardware import PRESETS
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.planning.stages import StageTable
from tests.support.planning import DIMS, equal_table, mixed_table, small_workload

# Links without latency and so fast that only compute is left.
IDEAL = PRESETS["a100-80g"].model_copy(
    update={
        "layer_overhead_s": 0.0,
        "memory_bytes_per_s": 1e30,
        "intra_node_bytes_per_s": 1e30,
        "inter_node_bytes_per_s": 1e30,
        "intra_node_latency_s": 0.0,
        "inter_node_latency_s": 0.0,
        "collective_latency_s": 0.0,
    }
)


def uniform(tensor, pipeline, data, count, checkpointing=False, zero=0):
    return Layout(None, Degrees(tensor, pipeline, data), count, checkpointing, zero)


def layer_seconds(workload):
    """Forward and backward seconds of one sample in every layer, from the cost model itself."""
    model, features = workload.model.times, workload.features
    times = {kind: model.predict(kind, features) for kind in workload.kinds}
    return np.array([[times[kind][0][0], times[kind][1][0]] for kind in workload.layers])


def test_one_gpu_takes_the_sum_of_all_work():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    found = Evaluator(StageTable(workload)).evaluate(uniform(1, 1, 1, 4))
    assert found.step_s == pytest.approx(8 * layer_seconds(workload).sum())
    assert found.bubble_fraction == pytest.approx(0.0)


def test_equal_microbatches_in_a_pipeline_take_the_textbook_time():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    stages = StageTable(workload)
    sizes = (6, 6)
    found = Evaluator(stages, blind=True).evaluate(uniform(1, 2, 1, 4), sizes)
    forward_s, backward_s = (2 * layer_seconds(workload)).reshape(2, 6, 2).sum(axis=1).T
    # The slower second stage never waits after its first input: fill, 4 microbatches, drain.
    assert forward_s[1] > forward_s[0]
    expected = forward_s[0] + 4 * (forward_s[1] + backward_s[1]) + backward_s[0]
    assert found.step_s == pytest.approx(expected)


def test_checkpointing_adds_a_second_forward():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    evaluator = Evaluator(StageTable(workload))
    plain, again = (evaluator.evaluate(uniform(1, 1, 1, 4, c)).step_s for c in (False, True))
    assert again - plain == pytest.approx(8 * layer_seconds(workload)[:, 0].sum())


def test_a_profile_with_checkpointing_says_the_same_of_both():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL, profiled_checkpointing=True)
    evaluator = Evaluator(StageTable(workload))
    without, with_it = (evaluator.evaluate(uniform(1, 1, 1, 4, c)).step_s for c in (False, True))
    seconds = layer_seconds(workload)
    assert with_it == pytest.approx(8 * seconds.sum())
    assert without == pytest.approx(8 * (seconds[:, 1].sum()))


def test_tensor_parallelism_divides_work_and_state():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    evaluator = Evaluator(StageTable(workload))
    one, four = evaluator.evaluate(uniform(1, 1, 1, 4)), evaluator.evaluate(uniform(4, 1, 1, 4))
    assert four.step_s == pytest.approx(one.step_s / 4)
    assert four.memory[0].optimizer_bytes == pytest.approx(one.memory[0].optimizer_bytes / 4)
    inner = 10 / 34 + 24 / 34 / 4
    assert four.memory[0].activations_bytes == pytest.approx(one.memory[0].activations_bytes * inner)


def test_reduction_follows_the_ring():
    hardware = IDEAL.model_copy(update={"intra_node_bytes_per_s": 1e9})
    workload = small_workload(equal_table(32), 8, hardware=hardware)
    evaluator = Evaluator(StageTable(workload))
    found = evaluator.evaluate(uniform(1, 1, 4, 2))
    counts = workload.model.memory.parameters
    parameters = sum(counts[kind] for kind in workload.layers)
    assert found.end_s == pytest.approx(2 * 3 / 4 * parameters * 2 / 1e9)


def test_two_encoder_replicas_halve_the_encoder():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    evaluator = Evaluator(StageTable(workload), blind=True)
    seconds = 2 * layer_seconds(workload)
    encoder_s, llm_s = seconds[:5].sum(axis=0), seconds[5:].sum(axis=0)
    for replicas in (1, 2):
        layout = Layout(Degrees(1, 1, replicas), Degrees(1, 1, 1), 4, False, 0)
        found = evaluator.evaluate(layout)
        expected = encoder_s.sum() / replicas + 4 * llm_s.sum()
        if encoder_s.sum() / replicas < llm_s.sum():
            assert found.step_s == pytest.approx(expected)


def test_an_encoder_for_two_llm_replicas_works_on_both():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    layout = Layout(Degrees(1, 1, 1), Degrees(1, 1, 2), 4, False, 0)
    found = Evaluator(StageTable(workload)).evaluate(layout)
    encoder_s = 8 * layer_seconds(workload)[:5].sum()
    llm_s = 4 * layer_seconds(workload)[5:].sum()
    assert found.step_s > max(encoder_s, llm_s)
    assert found.step_s < encoder_s + llm_s


def test_balanced_bins_are_no_slower_than_blind_ones():
    stages = StageTable(small_workload(mixed_table(128), 32, num_batches=3))
    layout = uniform(1, 3, 2, 8)
    assert Evaluator(stages).evaluate(layout).step_s < Evaluator(stages, blind=True).evaluate(layout).step_s


def test_more_batches_in_one_mean():
    stages = StageTable(small_workload(mixed_table(128), 32, num_batches=3))
    found = Evaluator(stages).evaluate(uniform(1, 3, 2, 8))
    assert found.steps_s.shape == (3,)
    assert found.step_s == pytest.approx(found.steps_s.mean())
    assert found.busy_s + found.idle_s + found.end_s == pytest.approx(found.step_s)


def test_a_measured_tensor_degree_is_taken_as_it_is():
    workload = small_workload(equal_table(32), 8, hardware=IDEAL)
    # Half as fast as one GPU, which no derived time would be.
    slow = IDEAL.model_copy(
        update={"peak_flops_per_s": {"bfloat16": 156e12, "float32": 1e12}, "memory_bytes_per_s": 5e29}
    )
    measured = small_workload(
        equal_table(32), 8, hardware=IDEAL, tensor_times={2: analytic_layer_model(DIMS, slow, "bfloat16")}
    )
    one = Evaluator(StageTable(workload)).evaluate(uniform(1, 1, 1, 4)).step_s
    assert Evaluator(StageTable(measured)).evaluate(uniform(1, 1, 1, 4)).step_s == pytest.approx(one)
    two = Evaluator(StageTable(measured)).evaluate(uniform(2, 1, 1, 4)).step_s
    assert two == pytest.approx(2 * one)
