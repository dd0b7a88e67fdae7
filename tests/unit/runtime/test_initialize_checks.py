"""What ``initialize`` refuses before anything is built; no process group is needed."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import ConfigError
from dflop_ds.runtime.initialize import _check, _config_source
from dflop_ds.shapes import SampleShape, ShapeTable


class _Stage(PipelineModule):
    """A local stage without DeepSpeed's constructor, which needs ranks."""

    stage_id = 3

    def __init__(self, *, trainable: bool = True) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=trainable)

    def stage_kinds(self) -> list[list[str]]:
        return [["head"]]


class _StockStage(PipelineModule):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(2))


def _probed(rows: list[int] | None = None) -> ProbedDataset:
    table = ShapeTable.from_shapes(SampleShape(f"s{i}", 0, 0, 5, 5, 2) for i in range(3))
    return ProbedDataset(list(range(9)), table, rows)


def _checked(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "ds_config": {"train_batch_size": 4, "zero_optimization": {"stage": 1}},
        "model": _Stage(),
        "optimizer": None,
        "training_data": _probed(),
        "collate_fn": list,
        "mpu": None,
    }
    assert _check(**(arguments | changes)) is None


def test_sound_arguments_pass() -> None:
    _checked()
    _checked(training_data=_probed([8, 0, 3]))
    _checked(training_data=None, collate_fn=None)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None, _StockStage()])
def test_another_model_is_refused_by_its_type(model: Any) -> None:
    with pytest.raises(ConfigError, match=f"must be a DflopPipelineModule, found {type(model).__name__}"):
        _checked(model=model)


def test_a_stage_with_nothing_to_train_is_named() -> None:
    with pytest.raises(ConfigError, match="trainable parameter, stage 3 has none"):
        _checked(model=_Stage(trainable=False))


def test_an_optimizer_that_nobody_has_is_named() -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "Adamm"}}
    for kind in ("Lamb", "LBFGS", "Adamm"):
        with pytest.raises(ConfigError, match=f"found '{kind}'.* SGD, .* adamw"):
            _checked(ds_config={**config, "optimizer": {"type": kind}})
    for kind in ("AdamW", "adam", "SGD", "RMSprop"):
        _checked(ds_config={**config, "optimizer": {"type": kind}})
    _checked(ds_config=config, optimizer=torch.optim.SGD([torch.zeros(1)]))


def test_data_without_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a ProbedDataset, found list"):
        _checked(training_data=[1, 2, 3])


def test_a_collator_is_required_with_data() -> None:
    with pytest.raises(ConfigError, match="collate_fn must be given with training_data, found None"):
        _checked(collate_fn=None)


def test_repeated_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="found repeated rows"):
        _checked(training_data=_probed([0, 2, 0]))


def test_a_grid_beside_that_of_the_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="mpu must be None"):
        _checked(mpu=object())


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_are_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=rf"zero_optimization\.stage: must be 0 or 1.*found {stage}"):
        _checked(ds_config={"train_batch_size": 4, "zero_optimization": {"stage": stage}})


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.enabled"):
        _checked(ds_config={"train_batch_size": 4, "fp16": {"enabled": True}})


ARGS = argparse.Namespace(deepspeed_config="from_args.json")


@pytest.mark.parametrize(
    ("args", "config", "config_params", "expected"),
    [
        (None, "a.json", None, "a.json"),
        (None, None, {"b": 1}, {"b": 1}),
        (ARGS, None, None, "from_args.json"),
        (argparse.Namespace(), {"c": 1}, None, {"c": 1}),
        (argparse.Namespace(deepspeed_config=None), "a.json", None, "a.json"),
    ],
)
def test_the_one_source_of_the_configuration(
    args: Any, config: Any, config_params: Any, expected: Any
) -> None:
    assert _config_source(args, config, config_params) == expected


@pytest.mark.parametrize(
    ("args", "config", "config_params", "count"),
    [
        (None, None, None, 0),
        (argparse.Namespace(deepspeed_config=None), None, None, 0),
        (None, "a.json", "b.json", 2),
        (ARGS, "a.json", None, 2),
        (ARGS, {"a": 1}, {"b": 1}, 3),
    ],
)
def test_no_or_several_sources_are_refused(args: Any, config: Any, config_params: Any, count: int) -> None:
    with pytest.raises(ConfigError, match=f"exactly one of .* found {count}"):
        _config_source(args, config, config_params)
