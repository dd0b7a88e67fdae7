"""Predicted layer times for this run."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator

from dflop_ds.config import DflopConfig, uses_bf16
from dflop_ds.cost.model import LayerCostModel
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import CostModelError
from dflop_ds.families import model_dims
from dflop_ds.flops import ModelDims
from dflop_ds.models.layers import LayerPlan
from dflop_ds.profiling.harness import profile_layers
from dflop_ds.profiling.selection import choose_microbatches
from dflop_ds.profiling.table import Fingerprint, ProfileTable, model_hash
from dflop_ds.profiling.tensor_parallel import Group, OneRank, TensorParallelGroup
from dflop_ds.runtime import distributed
from dflop_ds.runtime.loss import packed_loss

logger = logging.getLogger(__name__)

_PROFILED_SHAPES = 64


def compute_dtype(ds_config: dict[str, Any]) -> torch.dtype:
    """Type in which the layers run, from DeepSpeed's own keys."""
    return torch.bfloat16 if uses_bf16(ds_config) else torch.float32


def fingerprint(
    ds_config: dict[str, Any],
    config: DflopConfig,
    model_config: dict[str, Any],
    tensor_parallel_degree: int = 1,
) -> Fingerprint:
    """What a profile must have been measured under to be valid for this run."""
    device = distributed.device()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return Fingerprint(
        device=get_accelerator().device_name(),
        hardware=hardware,
        versions={
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
        },
        dtype=str(compute_dtype(ds_config)).removeprefix("torch."),
        attention=config.model.attention,
        activation_checkpointing=config.parallel.activation_checkpointing,
        model_hash=model_hash(model_config),
        tensor_parallel_degree=tensor_parallel_degree,
    )


def profiling_group(model_config: dict[str, Any]) -> Group:
    """The ranks that a launcher has started, as one tensor-parallel group; without one, this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return OneRank()
    distributed.start()
    dims = model_dims(model_config)
    heads = (dims.vision.num_heads, dims.llm.num_heads, dims.llm.num_kv_heads)
    return distributed.together(lambda: TensorParallelGroup(distributed.device(), heads))


def measure_profile(
    probed: ProbedDataset,
    plans: Sequence[LayerPlan],
    collate_fn: Callable[[list[Any]], Any],
    expected: Fingerprint,
    *,
    config: DflopConfig,
    dtype: torch.dtype,
    samples_per_bin: int,
    partial: Path | None = None,
    group: Group | None = None,
) -> ProfileTable:
    """Time one layer of every kind on this rank's device, at shapes of the data set.

    With `partial`, an interrupted measurement goes on where it stopped; the file is removed at the end.
    With `group`, every layer is cut over its ranks, all of which must call.
    """
    # The sample with most media, once and twice: random draws may miss what is rare in the data.
    heaviest = int(probed.table.encoder_inputs.argmax())
    chosen = choose_microbatches(probed.table, samples_per_bin, _PROFILED_SHAPES, config.seed)
    microbatches = [[heaviest], [heaviest, heaviest], *chosen]
    profile = profile_layers(
        plans,
        probed,
        microbatches,
        collate_fn=collate_fn,
        loss_fn=packed_loss,
        device=distributed.device(),
        dtype=dtype,
        activation_checkpointing=config.parallel.activation_checkpointing,
        budget_s=config.cost.profile_budget_s,
        partial=partial,
        partial_key=repr(expected),
        group=group,
    )
    table = ProfileTable(profile.rows, expected, profile.limits, profile.parameters)
    if partial is not None:
        partial.unlink(missing_ok=True)
    return table


def layer_cost_model(
    measure: Callable[[], ProfileTable],
    expected: Fingerprint,
    *,
    config: DflopConfig,
    dims: ModelDims,
    needed_kinds: Iterable[str],
) -> LayerCostModel:
    """Cost model of this run: fitted on rank 0, the same on every rank.

    A saved profile is used where the configuration names one; otherwise rank 0 measures once and
    keeps the result in the output directory, so that the next launch plans alike.

    Raises
    ------
    CostModelError
        On every rank, if the profile is missing, damaged or of another model.
    """

    def fit() -> bytes:
        table = _named_profile(config, expected) or _kept_profile(config, expected)
        if table is None:
            table = measure()
            path = _kept_path(config)
            path.parent.mkdir(parents=True, exist_ok=True)
            table.save(path)
            logger.info("profiled %d layer timings, kept in %s", len(table), path)
        missing = sorted(set(needed_kinds) - {row.kind for row in table.rows})
        if missing:
            raise CostModelError(
                f"a profile must time every layer kind of the model, found no rows of {missing}. "
                "Run `dflop-ds profile model` again."
            )
        return json.dumps(LayerCostModel().fit(table.rows, dims).to_dict()).encode()

    return LayerCostModel.from_dict(json.loads(distributed.on_first_rank(fit)))


def _named_profile(config: DflopConfig, expected: Fingerprint) -> ProfileTable | None:
    if config.cost.profile == "auto":
        return None
    table = ProfileTable.load(config.cost.profile)
    table.check_matches(expected, config.cost.on_other_conditions)
    return table


def _kept_profile(config: DflopConfig, expected: Fingerprint) -> ProfileTable | None:
    """The profile of an earlier launch, if it was measured under exactly these conditions."""
    path = _kept_path(config)
    if not path.is_file():
        return None
    try:
        table = ProfileTable.load(path)
    except CostModelError as error:
        logger.warning("the kept profile is not usable and is measured again: %s", error)
        return None
    return table if table.fingerprint == expected else None


def _kept_path(config: DflopConfig) -> Path:
    return Path(config.train.output_dir) / "profile.json"


def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} x {os.environ.get('OMP_NUM_THREADS', torch.get_num_threads())} threads"
