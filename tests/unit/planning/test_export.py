"""A plan as a DeepSpeed configuration."""

import dataclasses

import pytest

from dflop_ds.config import BatchSizes, parse_dflop
from dflop_ds.errors import ConfigError
from dflop_ds.planning.export import plan_config
from dflop_ds.planning.layout import Degrees, SearchSpace
from dflop_ds.planning.search import search
from dflop_ds.shapes import SampleShape, ShapeTable
from tests.support.planning import mixed_table, small_workload

CONFIG = {
    "train_batch_size": 99,
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 1000},
    "optimizer": {"type": "AdamW"},
    "dflop": {
        "model": {"path": "m"},
        "parallel": {"pipeline_stages": "auto"},
        "scheduler": {"policy": "lpt"},
    },
}


@pytest.fixture(scope="module")
def planned():
    workload = small_workload(mixed_table(64), 16)
    space = SearchSpace(4, min_stages=2, max_stages=2, zero_stages=(1,))
    return workload, search(workload, space, limit_bytes=80e9).best


def test_the_plan_is_in_the_configuration_and_the_rest_stays(planned):
    workload, plan = planned
    content = plan_config(CONFIG, plan, workload, 80e9, "profile.json")
    config = parse_dflop(content)
    assert config.parallel.pipeline_stages == 2
    assert config.parallel.split == list(plan.sizes)
    assert config.parallel.activation_checkpointing == plan.layout.activation_checkpointing
    assert config.cost.profile == "profile.json"
    assert config.scheduler.policy == "lpt"
    assert config.model.path == "m"
    assert content["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1000}
    assert content["optimizer"] == CONFIG["optimizer"]
    sizes = BatchSizes.from_ds_config(content, data_parallel_size=2)
    assert (sizes.train_batch_size, sizes.num_microbatches) == (16, plan.layout.num_microbatches)
    assert CONFIG["train_batch_size"] == 99


def test_limits_hold_every_sample_and_every_planned_microbatch(planned):
    workload, plan = planned
    scheduler = parse_dflop(plan_config(CONFIG, plan, workload, 80e9)).scheduler
    assert scheduler.max_tokens_per_microbatch >= max(plan.max_tokens, workload.table.llm_tokens.max())
    largest = max(plan.max_encoder_inputs, workload.table.encoder_inputs.max())
    assert scheduler.max_encoder_inputs_per_microbatch >= largest


@pytest.mark.parametrize("change", [{"encoder": Degrees(1, 1, 1)}, {"llm": Degrees(2, 2, 1)}])
def test_what_training_cannot_execute_is_not_written(planned, change):
    workload, plan = planned
    other = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, **change))
    with pytest.raises(ConfigError, match="--layouts runtime"):
        plan_config(CONFIG, other, workload, 80e9)


def test_a_sample_that_cannot_fit_is_left_to_the_policy_of_the_data(planned):
    _, plan = planned
    table = mixed_table(64)
    giant = SampleShape("giant", 0, 0, 10_000_000, 10_000_000, 100)
    workload = small_workload(ShapeTable.from_shapes([*(table[i] for i in range(64)), giant]), 16)
    scheduler = parse_dflop(plan_config(CONFIG, plan, workload, 80e9)).scheduler
    assert scheduler.max_tokens_per_microbatch < 10_000_000
