"""The ``"dflop"`` block of a DeepSpeed configuration, and the keys of DeepSpeed that we read."""

from dflop_ds.config.data import DataConfig, LossConfig
from dflop_ds.config.deepspeed_json import (
    BATCH_KEYS,
    BatchSizes,
    load_ds_config,
    plannable_zero_stages,
    reduce_bucket_values,
    require_optimizer,
    uses_bf16,
    uses_reentrant_checkpoints,
    validate_for_pipeline,
    with_fp32_accumulation,
    zero_stage,
)
from dflop_ds.config.finetune import FinetuneConfig, LoraSettings, ParamGroup
from dflop_ds.config.model import ModelConfig, ParallelConfig
from dflop_ds.config.scheduler import CostConfig, SchedulerConfig
from dflop_ds.config.schema import BLOCK, DflopConfig, json_schema, parse_dflop
from dflop_ds.config.training import TelemetryConfig, TrainConfig

__all__ = [
    "BATCH_KEYS",
    "BLOCK",
    "BatchSizes",
    "CostConfig",
    "DataConfig",
    "DflopConfig",
    "FinetuneConfig",
    "LoraSettings",
    "LossConfig",
    "ModelConfig",
    "ParallelConfig",
    "ParamGroup",
    "SchedulerConfig",
    "TelemetryConfig",
    "TrainConfig",
    "json_schema",
    "load_ds_config",
    "parse_dflop",
    "plannable_zero_stages",
    "reduce_bucket_values",
    "require_optimizer",
    "uses_bf16",
    "uses_reentrant_checkpoints",
    "validate_for_pipeline",
    "with_fp32_accumulation",
    "zero_stage",
]
