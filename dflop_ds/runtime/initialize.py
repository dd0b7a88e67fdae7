"""``dflop_ds.initialize``: the signature and return value of ``deepspeed.initialize``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import numpy as np
import numpy.typing as npt
import torch
from deepspeed import comm as dist
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.pipe import PipelineModule

from dflop_ds.config import (
    BatchSizes,
    DflopConfig,
    load_ds_config,
    parse_dflop,
    require_optimizer,
    validate_for_pipeline,
    with_fp32_accumulation,
)
from dflop_ds.cost.model import CostModel, SampleCosts
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.data.stream import StreamDataset
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.runtime import compat, distributed
from dflop_ds.runtime.engine import DataPlan, DflopPipelineEngine
from dflop_ds.runtime.param_groups import with_groups
from dflop_ds.runtime.shared_memory import forget_segment_names
from dflop_ds.runtime.stream_setup import stream_planner
from dflop_ds.runtime.versions import require_supported_deepspeed
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.shapes import ShapeTable

logger = logging.getLogger(__name__)

Initialized = tuple[Any, Any, Any, Any]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """Build an engine that trains on data-aware microbatches.

    Parameters are those of ``deepspeed.initialize``. With ``"dflop": {"enabled": false}``, or
    without the block, the call is passed on to DeepSpeed unchanged.

    Parameters
    ----------
    model : PipelineModule
        A :class:`~dflop_ds.runtime.module.DflopPipelineModule`, e.g. of
        :func:`~dflop_ds.runtime.setup.prepare`.
    training_data : ProbedDataset
        Samples with their shapes.
    collate_fn : callable
        A :class:`~dflop_ds.data.collate.PackedCollator`.
    config : str or dict
        DeepSpeed configuration with a ``"dflop"`` block.

    Returns
    -------
    tuple
        ``engine, optimizer, training_dataloader, lr_scheduler``.

    Raises
    ------
    UnsupportedVersionError
        If the installed DeepSpeed is outside the supported range.
    ConfigError
        On every rank, before any training collective.
    """
    require_supported_deepspeed()
    ds_config = load_ds_config(_config_source(args, config, config_params))
    passed_on = {
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "lr_scheduler": lr_scheduler,
        "collate_fn": collate_fn,
        "dist_init_required": dist_init_required,
    }
    dflop = parse_dflop(ds_config)
    if not dflop.enabled:
        return deepspeed.initialize(
            args=None if config is None and config_params is None else args,
            model=model,
            training_data=training_data,
            distributed_port=distributed_port,
            mpu=mpu,
            config=ds_config,
            mesh_param=mesh_param,
            **passed_on,
        )
    distributed.start(distributed_port=distributed_port, dist_init_required=dist_init_required)
    forget_segment_names()
    distributed.together(lambda: _check(ds_config, model, optimizer, training_data, collate_fn, mpu))
    engine = _build_engine(ds_config, dflop, model, training_data, args=args, **passed_on)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _build_engine(
    ds_config: dict[str, Any], config: DflopConfig, model: Any, dataset: Any, **passed_on: Any
) -> Any:
    """The engine of checked arguments; a collective call."""
    data_plan = None
    if dataset is not None:
        data_plan = distributed.together(lambda: make_data_plan(ds_config, config, model, dataset))
    engine_config = with_fp32_accumulation(ds_config)
    finetuning = getattr(model, "finetuning", None)
    if finetuning is not None and finetuning.groups:
        optimizer, parameters = passed_on["optimizer"], passed_on["model_parameters"]
        passed_on["model_parameters"], engine_config = distributed.together(
            lambda: with_groups(engine_config, model, optimizer, parameters)
        )
    return compat.make_engine(
        DflopPipelineEngine,
        engine_config,
        model=model,
        training_data=dataset,
        data_plan=data_plan,
        **passed_on,
    )


def make_data_plan(
    ds_config: dict[str, Any], config: DflopConfig, model: Any, dataset: ProbedDataset
) -> DataPlan:
    """Decide batch sizes, order, costs and limits; the same on every rank."""
    if not dataset.table.target_tokens.any():
        raise DataError(
            f"the training data must have supervised tokens, found none in {len(dataset.table)} samples; "
            'check that the answers are from "gpt" or "assistant".'
        )
    num_stages = model.num_pipeline_stages()
    num_replicas = dist.get_world_size() // num_stages
    sizes = BatchSizes.from_ds_config(ds_config, num_replicas)

    def make(table: ShapeTable, rows: npt.NDArray[np.int64]) -> StepPlanner:
        costs = _sample_costs(config, model, table, sizes)
        return StepPlanner.from_config(
            config, sizes, table=table, rows=rows, num_replicas=num_replicas, costs=costs
        )

    if isinstance(dataset, StreamDataset):
        return DataPlan(config, stream_planner(config, sizes, dataset, make, num_replicas), dataset.records)
    return DataPlan(config, make(dataset.table, dataset.rows))


def _sample_costs(
    config: DflopConfig, model: Any, table: ShapeTable, sizes: BatchSizes
) -> SampleCosts | None:
    if config.scheduler.policy == "blind":
        return None
    if model.layer_model is None:
        raise ConfigError(
            f'dflop.scheduler.policy "{config.scheduler.policy}" needs predicted layer times, found none '
            'on the model; build it by dflop_ds.prepare(), set model.layer_model, or use the policy "blind".'
        )
    cost_model = CostModel(
        model.layer_model,
        model.stage_kinds(),
        model.stage_training(),
        config.parallel.activation_checkpointing,
    )
    return cost_model.sample_costs(table, samples_per_bin=sizes.micro_batch_size)


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    found = [
        value
        for value in (config, config_params, getattr(args, "deepspeed_config", None))
        if value is not None
    ]
    if len(found) != 1:
        raise ConfigError(
            "exactly one of config, config_params and args.deepspeed_config must be given, "
            f"found {len(found)}; pass the DeepSpeed configuration once."
        )
    return found[0]


def _check(
    ds_config: dict[str, Any], model: Any, optimizer: Any, training_data: Any, collate_fn: Any, mpu: Any
) -> None:
    """What must hold on every rank before the engine is built."""
    validate_for_pipeline(ds_config)
    if optimizer is None and ds_config.get("optimizer") is not None:
        require_optimizer(ds_config, compat.optimizer_names())
    if mpu is not None:
        raise ConfigError(
            "mpu must be None with a pipeline module, found one; the module brings its own grid."
        )
    if not isinstance(model, PipelineModule) or not hasattr(model, "stage_kinds"):
        raise ConfigError(
            f"model must be a DflopPipelineModule, found {type(model).__name__}; build it with "
            'dflop_ds.prepare(), or set "dflop": {"enabled": false}.'
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"every pipeline stage must have a trainable parameter, stage {model.stage_id} has none; freeze "
            "by dflop.finetune.freeze, which handles this, or choose another dflop.parallel.split."
        )
    if training_data is None:
        return
    if not isinstance(training_data, ProbedDataset):
        raise ConfigError(
            f"training_data must be a ProbedDataset, found {type(training_data).__name__}; "
            "wrap your data set with its shapes: ProbedDataset(dataset, table)."
        )
    if collate_fn is None:
        raise ConfigError("collate_fn must be given with training_data, found None; pass a PackedCollator.")
    if not np.array_equal(np.unique(training_data.rows), np.sort(training_data.rows)):
        raise ConfigError(
            "every sample must occur once in the training data, found repeated rows; drop the repeats."
        )
