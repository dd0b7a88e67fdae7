"""From a configuration to everything that training needs: data, shapes, costs, stages, model."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from deepspeed import comm as dist
from transformers import AutoConfig

from dflop_ds.config import BatchSizes, DflopConfig, uses_reentrant_checkpoints, validate_for_pipeline
from dflop_ds.cost.features import ENCODER_KINDS, MicrobatchFeatures
from dflop_ds.cost.model import LayerCostModel
from dflop_ds.cost.quantiles import whole_microbatches
from dflop_ds.cost.split import balanced_split, configured_boundaries, expected_layer_times
from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.probe import ProbeResult, probe
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import ConfigError
from dflop_ds.families import family_of, import_families, model_dims
from dflop_ds.flops import ModelDims
from dflop_ds.models.attention import resolve_backend
from dflop_ds.models.layers import LayerPlan
from dflop_ds.models.weights import Checkpoint, load_layers
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.runtime import costs, distributed
from dflop_ds.runtime.finetune import checkpoint_function, plan_finetuning
from dflop_ds.runtime.module import DflopPipelineModule
from dflop_ds.runtime.shared_memory import forget_segment_names
from dflop_ds.shapes import ShapeTable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What :func:`prepare` made of a configuration.

    Attributes
    ----------
    model : DflopPipelineModule
        The local stage only.
    dataset : ProbedDataset
    eval_dataset : ProbedDataset or None
    collate_fn : PackedCollator
    """

    model: DflopPipelineModule
    dataset: ProbedDataset
    eval_dataset: ProbedDataset | None
    collate_fn: PackedCollator


def prepare(ds_config: dict[str, Any], config: DflopConfig) -> Setup:
    """Read the data, predict times, cut the model into stages, build the local one.

    A collective call: rank 0 reads media headers and times layers, the others get the result.
    Every error is raised on all ranks.

    Parameters
    ----------
    ds_config : dict
        The whole DeepSpeed configuration.
    config : DflopConfig
        Its ``"dflop"`` block.
    """
    forget_segment_names()
    distributed.together(lambda: validate_for_pipeline(ds_config))
    distributed.together(config.require_training_inputs)
    distributed.together(lambda: check_outputs(config))
    num_stages = distributed.together(lambda: resolve_stages(config, dist.get_world_size()))
    num_replicas = dist.get_world_size() // num_stages
    sizes = distributed.together(lambda: BatchSizes.from_ds_config(ds_config, num_replicas))
    model_config = distributed.together(lambda: read_model_config(config))
    dataset = open_probed(config, model_config, config.data.train_path, config.data.shape_cache)
    eval_dataset = None
    if config.data.eval_path is not None:
        eval_dataset = open_probed(config, model_config, config.data.eval_path, None)
    collate_fn = make_collator(dataset.dataset, config)
    plans = distributed.together(lambda: layer_plans(ds_config, config, model_config))
    finetuning = distributed.together(lambda: plan_finetuning(config.finetune, plans))
    layer_model = boundaries = None
    if config.enabled:
        layer_model = _cost_model(ds_config, config, model_config, plans, dataset, collate_fn, sizes)
        boundaries = distributed.together(
            lambda: configured_boundaries(
                config,
                [plan.kind for plan in plans],
                num_stages,
                layer_model,
                dataset.table,
                sizes.micro_batch_size,
                None if finetuning is None else finetuning.layers,
            )
        )
    reentrant = uses_reentrant_checkpoints(ds_config)
    model = build_module(config, model_config, plans, num_stages, boundaries, reentrant)
    if finetuning is not None:
        model.finetune(finetuning)
    model.layer_model = layer_model
    return Setup(model, dataset, eval_dataset, collate_fn)


def profile_model(
    ds_config: dict[str, Any], config: DflopConfig, partial: Path | None = None
) -> ProfileTable:
    """Time one layer of every kind on this device.

    Where a launcher has started several ranks, they form one tensor-parallel group, and the share of a
    layer that each of them computes is timed, communication included. All ranks must call.

    Parameters
    ----------
    ds_config, config
        As for :func:`prepare`.
    partial : Path, optional
        File that keeps finished measurements until all are there.
    """
    config.require_training_inputs()
    model_config = read_model_config(config)
    content = _content(model_config)
    group = costs.profiling_group(content)
    source = open_dataset(config)
    found = _scan(source, config, model_config, config.data.shape_cache)
    dataset = ProbedDataset(source, found.table, found.rows)
    # Where the mean microbatch is given, the number of replicas need not be known.
    samples_per_bin = ds_config.get("train_micro_batch_size_per_gpu")
    if samples_per_bin is None:
        samples_per_bin = BatchSizes.from_ds_config(ds_config, data_parallel_size=1).micro_batch_size
    return costs.measure_profile(
        dataset,
        layer_plans(ds_config, config, model_config),
        make_collator(source, config),
        costs.fingerprint(ds_config, config, content, group.size),
        config=config,
        dtype=costs.compute_dtype(ds_config),
        samples_per_bin=samples_per_bin,
        partial=partial,
        group=group,
    )


def check_outputs(config: DflopConfig) -> None:
    """Make sure, on rank 0, that everything the run will write can be written.

    Raises
    ------
    ConfigError
        Naming the key, before anything was computed.
    """
    if dist.get_rank() != 0:
        return
    wanted = {
        "dflop.train.output_dir": Path(config.train.output_dir),
        "dflop.telemetry.trace": config.telemetry.trace and Path(config.telemetry.trace).parent,
        "dflop.telemetry.plan_log": config.telemetry.plan_log and Path(config.telemetry.plan_log).parent,
    }
    for key, folder in wanted.items():
        if not folder:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"{key} must be in a folder that can be written, found {error}; change it."
            ) from error


def profile_data(config: DflopConfig, cache: Path, processes: int | None = None) -> ProbeResult:
    """Shapes of the training data; unusable samples are in ``dropped`` with the reason.

    Parameters
    ----------
    config : DflopConfig
    cache : Path
        NPZ file; samples whose files have not changed since are not read again.
    processes : int, optional
        Instead of ``dflop.data.scan_processes``.
    """
    if config.data.train_path is None:
        raise ConfigError("dflop.data.train_path must name a JSON or JSONL file; found null. Set it.")
    data = config.data.model_copy(update={"broken": "drop", "oversized": "drop"})
    if processes is not None:
        data = data.model_copy(update={"scan_processes": processes})
    lenient = config.model_copy(update={"data": data})
    return _scan(open_dataset(config), lenient, read_model_config(config), str(cache))


def stages_for_report(
    ds_config: dict[str, Any], config: DflopConfig, table: ProfileTable, num_stages: int
) -> tuple[ModelDims, list[list[str]]]:
    """Dimensions of the model and its layer kinds by stage, balanced for the profiled microbatches.

    Raises
    ------
    CostModelError
        If the profile is of another model.
    """
    model_config = read_model_config(config)
    content = _content(model_config)
    table.check_matches(costs.fingerprint(ds_config, config, content))
    dims = model_dims(content)
    kinds = [plan.kind for plan in layer_plans(ds_config, config, model_config)]
    model = LayerCostModel(warn=False).fit(table.rows, dims)
    profiled = MicrobatchFeatures.from_rows([group[0] for group in whole_microbatches(table.rows)])
    bounds = balanced_split(kinds, expected_layer_times(model, kinds, profiled), num_stages)
    return dims, [kinds[start:stop] for start, stop in itertools.pairwise(bounds)]


def resolve_stages(config: DflopConfig, world_size: int) -> int:
    """Number of pipeline stages of ``world_size`` ranks."""
    stages = config.parallel.pipeline_stages
    if stages == "auto":
        if world_size > 2:
            raise ConfigError(
                f'dflop.parallel.pipeline_stages must be a number for more than 2 ranks, found "auto" '
                f"for {world_size}; set it to a divisor of {world_size}."
            )
        return world_size
    if world_size % stages:
        raise ConfigError(
            f"the number of ranks must be a multiple of dflop.parallel.pipeline_stages, found "
            f"{world_size} ranks "
            f"for {stages} stages; change one of them."
        )
    return int(stages)


def read_model_config(config: DflopConfig) -> Any:
    """``transformers`` configuration of the model directory."""
    import_families(config.model.family_module)
    try:
        return AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dflop.model.path must be a local Hugging Face directory, found {config.model.path}: {error}. "
            "Set it to a directory with config.json (`dflop-ds demo-data` makes a tiny one)."
        ) from error


def open_probed(
    config: DflopConfig, model_config: Any, records_path: str | None, shape_cache: str | None
) -> ProbedDataset:
    """Open a data set on every rank; its shapes are read by rank 0 and sent to all."""
    dataset = distributed.together(lambda: open_dataset(config, records_path))

    def scan() -> bytes:
        found = _scan(dataset, config, model_config, shape_cache)
        buffer = io.BytesIO()
        np.save(buffer, found.rows, allow_pickle=False)
        found.table.write(buffer)
        return buffer.getvalue()

    buffer = io.BytesIO(distributed.on_first_rank(scan))
    rows = np.load(buffer, allow_pickle=False)
    return ProbedDataset(dataset, ShapeTable.read(io.BytesIO(buffer.read())), rows)


def make_collator(dataset: LlavaDataset, config: DflopConfig) -> PackedCollator:
    """Collator of packed microbatches; with dflop disabled, of DeepSpeed's per-microbatch mean."""
    pad = dataset.tokenizer.pad_token_id
    return PackedCollator(
        dataset.tokenizer.eos_token_id if pad is None else pad,
        row_shape=dataset.processor.row_shape,
        reduction=config.loss.reduction,
        normalise="none" if config.enabled else "microbatch",
    )


def layer_plans(ds_config: dict[str, Any], config: DflopConfig, model_config: Any) -> list[LayerPlan]:
    """Plans of the model's pipeline layers."""
    attention = resolve_backend(config.model.attention, distributed.device(), costs.compute_dtype(ds_config))
    family = family_of(_content(model_config))
    plans: list[LayerPlan] = family.pipeline_layers(model_config, attention=attention, seed=config.seed)
    return plans


def build_module(
    config: DflopConfig,
    model_config: Any,
    plans: list[LayerPlan],
    num_stages: int,
    boundaries: list[int] | None,
    reentrant: bool = False,
) -> DflopPipelineModule:
    """Build the local stage and load its weights."""
    split = config.parallel.split
    checkpointed = config.parallel.activation_checkpointing
    model = DflopPipelineModule(
        plans,
        num_stages=num_stages,
        boundaries=boundaries,
        partition_method=split if split in ("parameters", "uniform") else "parameters",
        activation_checkpoint_interval=1 if checkpointed else 0,
        activation_checkpoint_func=checkpoint_function(reentrant),
    )
    directory = Path(config.model.path or "")
    pretrained = config.model.weights == "pretrained" or (
        config.model.weights == "auto" and Checkpoint.exists(directory)
    )
    if pretrained:
        names = family_of(_content(model_config)).published_names
        distributed.together(lambda: load_layers(model.local_layers(), Checkpoint(directory, names)))
    return model


def open_dataset(config: DflopConfig, records_path: str | None = None) -> LlavaDataset:
    """The data set of `records_path`, by default of ``dflop.data.train_path``; nothing is read yet."""
    import_families(config.model.family_module)
    path = Path(records_path or config.data.train_path or "")
    return from_pretrained_dir(
        config.model.path or "",
        path,
        media_root=config.data.media_root or path.parent,
        max_frames=config.data.max_frames,
        frames_per_second=config.data.frames_per_second,
        seed=config.seed,
    )


def _scan(
    dataset: LlavaDataset, config: DflopConfig, model_config: Any, shape_cache: str | None
) -> ProbeResult:
    limits = (config.data.max_tokens, _number(config.scheduler.max_tokens_per_microbatch))
    longest = int(model_config.get_text_config().max_position_embeddings)
    return probe(
        dataset,
        max_tokens=min([longest, *(limit for limit in limits if limit is not None)]),
        max_encoder_inputs=_number(config.scheduler.max_encoder_inputs_per_microbatch),
        broken=config.data.broken,
        oversized=config.data.oversized,
        scan=config.data.scan,
        processes=config.data.scan_processes,
        cache=shape_cache,
    )


def _content(model_config: Any) -> dict[str, Any]:
    """The model configuration with all its defaults written out."""
    return dict(json.loads(model_config.to_json_string(use_diff=False)))


def _cost_model(
    ds_config: dict[str, Any],
    config: DflopConfig,
    model_config: Any,
    plans: list[LayerPlan],
    dataset: ProbedDataset,
    collate_fn: PackedCollator,
    sizes: BatchSizes,
) -> LayerCostModel | None:
    if config.scheduler.policy == "blind" and config.parallel.split != "auto":
        return None
    content = _content(model_config)
    expected = costs.fingerprint(ds_config, config, content)
    return costs.layer_cost_model(
        lambda: costs.measure_profile(
            dataset,
            plans,
            collate_fn,
            expected,
            config=config,
            dtype=costs.compute_dtype(ds_config),
            samples_per_bin=sizes.micro_batch_size,
        ),
        expected,
        config=config,
        dims=model_dims(content),
        # Without media the encoder has no work, and no times.
        needed_kinds={plan.kind for plan in plans}
        - (set() if dataset.table.encoder_inputs.any() else set(ENCODER_KINDS)),
    )


def _number(limit: Any) -> int | None:
    return limit if isinstance(limit, int) else None
