"""The "dflop" block: strictness, messages, batch sizes and the pipeline's rules."""

from __future__ import annotations

import json

import pydantic
import pytest

from dflop_ds import config as config_module
from dflop_ds.config import (
    BatchSizes,
    DflopConfig,
    json_schema,
    load_ds_config,
    parse_dflop,
    require_optimizer,
    validate_for_pipeline,
    with_fp32_accumulation,
)
from dflop_ds.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def problems(block):
    with pytest.raises(ConfigError) as caught:
        parse_dflop({"dflop": block})
    return str(caught.value).splitlines()


def test_absent_block_is_disabled_and_empty_block_is_enabled():
    assert parse_dflop({TRAIN: 8}).enabled is False
    assert parse_dflop({"dflop": {}}).enabled is True


def test_defaults():
    block = parse_dflop({"dflop": {}})
    assert (block.seed, block.model.path, block.model.weights) == (1234, None, "auto")
    assert (block.parallel.pipeline_stages, block.parallel.split) == ("auto", "auto")
    assert (block.data.max_frames, block.data.frames_per_second, block.data.tail) == (32, 1.0, "partial")
    assert (block.loss.reduction, block.cost.profile, block.cost.profile_budget_s) == ("token", "auto", 30.0)
    assert (block.scheduler.policy, block.scheduler.lookahead, block.scheduler.order) == ("cp_sat", 2, True)
    assert (block.telemetry.enabled, block.train.output_dir) == (True, "runs/train")


def test_config_is_immutable():
    with pytest.raises(pydantic.ValidationError):
        parse_dflop({"dflop": {}}).seed = 3


@pytest.mark.parametrize(
    ("block", "path", "suggestion"),
    [
        ({"data": {"max_frame": 8}}, "dflop.data.max_frame", "dflop.data.max_frames"),
        ({"schedular": {}}, "dflop.schedular", "dflop.scheduler"),
        ({"num_workers": 4}, "dflop.num_workers", "dflop.data.num_workers"),
        ({"train": {"lookahaed": 4}}, "dflop.train.lookahaed", "dflop.scheduler.lookahead"),
    ],
)
def test_unknown_key_names_path_and_nearest_valid_name(block, path, suggestion):
    (line,) = problems(block)
    assert line.startswith(f"{path}: unknown key")
    assert f"Did you mean {suggestion}?" in line


def test_unknown_key_without_a_near_name_lists_the_valid_ones():
    (line,) = problems({"loss": {"zzzz": 1}})
    assert line == "dflop.loss.zzzz: unknown key; found 1. Valid keys of dflop.loss: reduction."


@pytest.mark.parametrize(
    ("block", "path", "expected", "found"),
    [
        ({"data": {"num_workers": "2"}}, "dflop.data.num_workers", "integer", "'2'"),
        ({"seed": True}, "dflop.seed", "integer", "True"),
        ({"seed": 1.0}, "dflop.seed", "integer", "1.0"),
        ({"data": {"shuffle": 1}}, "dflop.data.shuffle", "boolean", "1"),
        ({"data": {"frames_per_second": 0}}, "dflop.data.frames_per_second", "greater than 0", "0"),
        ({"cost": {"profile_budget_s": float("nan")}}, "dflop.cost.profile_budget_s", "finite", "nan"),
        ({"parallel": {"pipeline_stages": 0}}, "dflop.parallel.pipeline_stages", "equal to 1 or 'auto'", "0"),
        ({"parallel": {"split": [2, 0], "pipeline_stages": 2}}, "dflop.parallel.split[1]", "equal to 1", "0"),
        ({"model": {"path": ""}}, "dflop.model.path", "at least 1 char", "''"),
        ({"model": 3}, "dflop.model", "object", "3"),
        ({"data": None}, "dflop.data", "object", "None"),
    ],
)
def test_wrong_value_names_path_expectation_and_value(block, path, expected, found):
    (line,) = problems(block)
    assert line.startswith(f"{path}: ")
    assert expected in line
    assert f"found {found}." in line


def test_block_itself_must_be_an_object():
    with pytest.raises(ConfigError, match=r"^dflop: must be an object in braces; found None\."):
        parse_dflop({"dflop": None})


def test_wrong_word_suggests_the_nearest_choice():
    (line,) = problems({"scheduler": {"policy": "cp-sat"}})
    assert line.endswith("Did you mean 'cp_sat'?")


def test_every_problem_is_listed():
    lines = problems({"seed": -1, "loss": {"reduction": "mean"}, "data": {"tail": "keep"}})
    assert {line.split(":")[0] for line in lines} == {"dflop.seed", "dflop.loss.reduction", "dflop.data.tail"}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"train": {"num_steps": 3, "num_epochs": 1}}, "num_steps is 3, num_epochs is 1.0"),
        ({"telemetry": {"trace_step": 5}}, "trace_step is 5, trace is null"),
        ({"parallel": {"split": [1, 2], "pipeline_stages": 3}}, "pipeline_stages is 3, the list has 2"),
        ({"parallel": {"split": [1, 2]}}, "pipeline_stages is 'auto', the list has 2"),
    ],
)
def test_contradictions(block, words):
    (line,) = problems(block)
    assert words in line


def test_whole_numbers_are_accepted_for_floats():
    assert parse_dflop({"dflop": {"cost": {"profile_budget_s": 3}}}).cost.profile_budget_s == 3.0


@pytest.mark.parametrize("value", ["auto", None, 4096])
def test_microbatch_limits(value):
    block = parse_dflop({"dflop": {"scheduler": {"max_tokens_per_microbatch": value}}})
    assert block.scheduler.max_tokens_per_microbatch == value


@pytest.mark.parametrize("key", ["dflops", "Dflop", "DFLOP"])
def test_misspelled_block_name_is_an_error(key):
    with pytest.raises(ConfigError, match="must be called 'dflop'"):
        parse_dflop({key: {}})


def test_flops_profiler_is_not_taken_for_the_block():
    assert parse_dflop({"flops_profiler": {"enabled": True}}).enabled is False


def test_training_inputs_are_required_all_at_once():
    with pytest.raises(ConfigError) as caught:
        DflopConfig().require_training_inputs()
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "dflop.model.path",
        "dflop.data.train_path",
        "dflop.train",
    ]


def test_schema_documents_every_field():
    schema = json_schema()
    models = [schema, *schema["$defs"].values()]
    assert len(models) == 12
    for model in models:
        assert model["additionalProperties"] is False
        for name, field in model["properties"].items():
            assert len(field.get("description", "")) > 10, name
    json.dumps(schema)


def test_public_names_resolve():
    assert all(hasattr(config_module, name) for name in config_module.__all__)


def test_load_reads_json_and_copies_dicts(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    assert load_ds_config(path) == load_ds_config(str(path)) == {TRAIN: 8}
    given = {"dflop": {"seed": 1}}
    load_ds_config(given)["dflop"]["seed"] = 2
    assert given == {"dflop": {"seed": 1}}


def test_load_accepts_comments_as_deepspeed_does(tmp_path):
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_text('{\n  # the global batch\n  "train_batch_size": 8\n}')
    assert load_ds_config(path) == {TRAIN: 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "found twice: \\['a'\\]"),
        ('{"a": [}', "line 1, column 8"),
        ("[1]", "must hold a JSON object, found list"),
    ],
)
def test_load_explains_bad_files(tmp_path, text, words):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_ds_config(path)


def test_load_explains_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load_ds_config(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("keys", "replicas", "expected"),
    [
        ({TRAIN: 32, MICRO: 2}, 1, (32, 2, 16)),
        ({TRAIN: 32, STEPS: 4}, 2, (32, 4, 4)),
        ({MICRO: 2, STEPS: 8}, 4, (64, 2, 8)),
        ({TRAIN: 32, MICRO: 2, STEPS: 8}, 2, (32, 2, 8)),
        ({TRAIN: 32}, 4, (32, 8, 1)),
        ({MICRO: 3}, 4, (12, 3, 1)),
    ],
)
def test_two_batch_keys_give_the_third(keys, replicas, expected):
    sizes = BatchSizes.from_ds_config(keys, replicas)
    assert (sizes.train_batch_size, sizes.micro_batch_size, sizes.num_microbatches) == expected


def test_contradicting_batch_keys_show_all_three_values():
    with pytest.raises(ConfigError) as caught:
        BatchSizes.from_ds_config({TRAIN: 33, MICRO: 2, STEPS: 8}, 2)
    for words in (f"{TRAIN} = 33", f"{MICRO} = 2", f"{STEPS} = 8", "33 != 2 x 8 x 2"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "replicas"),
    [
        ({}, 1),
        ({STEPS: 4}, 1),
        ({TRAIN: 7, MICRO: 2}, 1),
        ({TRAIN: 4, MICRO: 8}, 1),
        ({TRAIN: 2}, 4),
        ({TRAIN: "auto", MICRO: 2}, 1),
        ({TRAIN: "32", MICRO: 2}, 1),
        ({TRAIN: 32.0, MICRO: 2}, 1),
        ({TRAIN: True, MICRO: 1}, 1),
        ({TRAIN: 0, MICRO: 1}, 1),
        ({TRAIN: 8, STEPS: 0}, 1),
        ({TRAIN: 8, MICRO: 1}, 0),
    ],
)
def test_bad_batch_keys(keys, replicas):
    with pytest.raises(ConfigError):
        BatchSizes.from_ds_config(keys, replicas)


@pytest.mark.parametrize("stage", [2, 3, "1", True])
def test_pipeline_refuses_other_zero_stages(stage):
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage: must be 0 or 1.*Trainer path"):
        validate_for_pipeline({"zero_optimization": {"stage": stage}})


def test_pipeline_lists_every_refusal():
    bad = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "amp": {"enabled": True}}
    with pytest.raises(ConfigError) as caught:
        validate_for_pipeline(bad)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "zero_optimization.stage",
        "fp16.enabled",
        "amp.enabled",
    ]
    assert "bf16" in lines[1]


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": False}, "zero_optimization": None},
    ],
)
def test_pipeline_accepts(good):
    validate_for_pipeline(good)


def test_adaptive_correction_needs_telemetry():
    block = {"cost": {"adaptive": True}, "telemetry": {"enabled": False}}
    with pytest.raises(ConfigError, match=r"adaptive needs measured stage times"):
        parse_dflop({"dflop": block})


def test_bf16_gradients_are_summed_in_fp32_unless_asked_otherwise():
    assert with_fp32_accumulation({"optimizer": {}}) == {"optimizer": {}}
    chosen = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert with_fp32_accumulation(chosen) == chosen
    bucket = {"zero_optimization": {"reduce_bucket_size": 5}}
    found = with_fp32_accumulation({"bf16": {"enabled": True}, **bucket})
    assert found["data_types"] == {"grad_accum_dtype": "fp32"}
    assert found["zero_optimization"] == {"reduce_bucket_size": 5, "stage": 1}
    assert found["zero_allow_untested_optimizer"] is True, "SGD works in bf16 without ZeRO, and must go on to"
    zero = with_fp32_accumulation({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    assert "zero_allow_untested_optimizer" not in zero


@pytest.mark.parametrize("optimizer", [None, {}, {"type": None}, {"type": ""}, {"type": "Adan"}])
def test_the_entry_point_needs_an_optimizer(optimizer):
    known = {"adamw", "SGD"}
    with pytest.raises(ConfigError, match=r"optimizer\.type must name .* or another of SGD, adamw\."):
        require_optimizer({"optimizer": optimizer}, known)
    for name in ("AdamW", "adamw", "SGD"):
        require_optimizer({"optimizer": {"type": name}}, known)


def test_zero_1_takes_optimizers_of_a_list():
    config = {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match=r"must be one of adam, .* with ZeRO 1, found 'SGD'"):
        require_optimizer(config, {"SGD"})
    require_optimizer({**config, "zero_allow_untested_optimizer": True}, {"SGD"})
