"""A plan as a complete DeepSpeed configuration."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop_ds.config import BLOCK, BatchSizes, parse_dflop, validate_for_pipeline
from dflop_ds.errors import ConfigError
from dflop_ds.planning.advice import oversized_rows
from dflop_ds.planning.evaluation import Evaluation
from dflop_ds.planning.workload import Workload
from dflop_ds.shapes import ShapeTable

_CAP_MARGIN = 1.1
"""Other batches have somewhat larger microbatches than the drawn ones."""


def plan_config(
    ds_config: dict[str, Any],
    plan: Evaluation,
    workload: Workload,
    limit_bytes: float,
    profile: str | None = None,
) -> dict[str, Any]:
    """Write a plan into a copy of a DeepSpeed configuration.

    Batch sizes, ZeRO stage, stages, split, checkpointing and the hard limits of a microbatch come from the
    plan; everything else stays.

    Parameters
    ----------
    ds_config : dict
    plan : Evaluation
        Of a uniform layout without tensor parallelism.
    workload : Workload
        That was planned for.
    limit_bytes : float
        Memory of one GPU that a stage may use: samples that do not fit even alone are above the written
        limits, so that ``data.oversized`` decides about them.
    profile : str, optional
        Path of the profile that the plan was made with.

    Raises
    ------
    ConfigError
        If the runtime cannot execute the layout, or the result is not a valid configuration.
    """
    layout = plan.layout
    if layout.encoder is not None or layout.llm.tensor != 1:
        raise ConfigError(
            "a configuration can only hold what the runtime executes, a uniform pipeline with tensor "
            f"degree 1; found {layout}. Plan with --layouts runtime."
        )
    result = copy.deepcopy(ds_config)
    batch_size = workload.batch_size
    fitting = np.setdiff1d(np.arange(len(workload.table)), oversized_rows(workload, plan, limit_bytes))
    replicas, count = layout.llm.data, layout.num_microbatches
    result["train_batch_size"] = batch_size
    result["train_micro_batch_size_per_gpu"] = batch_size // (replicas * count)
    result["gradient_accumulation_steps"] = count
    result["zero_optimization"] = {**(result.get("zero_optimization") or {}), "stage": layout.zero_stage}
    result[BLOCK] = _dflop_block(result.get(BLOCK, {}), plan, workload.table.take(fitting), profile)
    validate_for_pipeline(result)
    parse_dflop(result)
    BatchSizes.from_ds_config(result, replicas)
    return result


def _dflop_block(
    given: dict[str, Any], plan: Evaluation, table: ShapeTable, profile: str | None
) -> dict[str, Any]:
    """The ``"dflop"`` block with the plan; `table` holds the samples that fit."""
    block = {**given, "enabled": True}
    block["parallel"] = {
        **block.get("parallel", {}),
        "pipeline_stages": plan.layout.llm.pipeline,
        "split": list(plan.sizes),
        "activation_checkpointing": plan.layout.activation_checkpointing,
    }
    block["scheduler"] = {
        **block.get("scheduler", {}),
        "max_tokens_per_microbatch": _cap(plan.max_tokens, table.llm_tokens),
        "max_encoder_inputs_per_microbatch": _cap(plan.max_encoder_inputs, table.encoder_inputs),
    }
    if profile is not None:
        block["cost"] = {**block.get("cost", {}), "profile": profile}
    return block


def _cap(largest_microbatch: int, samples: npt.NDArray[np.int64]) -> int:
    return max(1, int(samples.max(initial=0)), math.ceil(_CAP_MARGIN * largest_microbatch))
