"""From a configuration to everything that training needs: data, shapes, costs, stages, model."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tempfile
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from dflop_ds.config import BatchSizes, DflopConfig, uses_reentrant_checkpoints, validate_for_pipeline
from dflop_ds.cost.features import ENCODER_KINDS, MicrobatchFeatures
from dflop_ds.cost.model import LayerCostModel
from dflop_ds.cost.quantiles import whole_microbatches
from dflop_ds.cost.split import balanced_split, configured_boundaries, expected_layer_times
from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.probe import ProbeResult
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import ConfigError
from dflop_ds.families import model_dims
from dflop_ds.flops import ModelDims
from dflop_ds.models.layers import LayerPlan
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.runtime import costs, distributed
from dflop_ds.runtime.data_setup import make_collator, open_dataset, open_probed, scan_shapes
from dflop_ds.runtime.export import require_replaceable
from dflop_ds.runtime.finetune import plan_finetuning
from dflop_ds.runtime.model_setup import build_module, layer_plans, model_content, read_model_config
from dflop_ds.runtime.module import DflopPipelineModule
from dflop_ds.runtime.shared_memory import forget_segment_names
from dflop_ds.runtime.stream_setup import is_stream, open_stream

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


def prepare(ds_config: dict[str, Any], config: DflopConfig, train_data: Any = None) -> Setup:
    """Read the data, predict times, cut the model into stages, build the local one.

    A collective call: rank 0 reads media headers and times layers, the others get the result.
    Every error is raised on all ranks.

    Parameters
    ----------
    ds_config : dict
        The whole DeepSpeed configuration.
    config : DflopConfig
        Its ``"dflop"`` block.
    train_data : datasets.Dataset, datasets.IterableDataset, list or other iterable of dict, optional
        Records in LLaVA's format, the same on every rank, instead of ``dflop.data.train_path``. They may hold
        images and recordings themselves. What has no length is a stream.
    """
    forget_segment_names()
    distributed.together(lambda: validate_for_pipeline(ds_config))
    distributed.together(lambda: config.require_training_inputs(has_data=train_data is not None))
    distributed.together(lambda: check_outputs(config))
    num_stages = distributed.together(lambda: resolve_stages(config, dist.get_world_size()))
    num_replicas = dist.get_world_size() // num_stages
    sizes = distributed.together(lambda: BatchSizes.from_ds_config(ds_config, num_replicas))
    model_config = distributed.together(lambda: read_model_config(config))
    if is_stream(config, train_data):
        dataset: ProbedDataset = open_stream(config, model_config, train_data, sizes.train_batch_size)
    else:
        dataset = open_probed(config, model_config, train_data, config.data.shape_cache)
    eval_dataset = None
    if config.data.eval_path is not None:
        eval_dataset = open_probed(config, model_config, config.data.eval_path, None)
    collate_fn = make_collator(dataset.dataset, config)
    plans = distributed.together(lambda: layer_plans(ds_config, config, model_config))
    finetuning = distributed.together(lambda: plan_finetuning(config.finetune, plans, config.seed))
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
    content = model_content(model_config)
    group = costs.profiling_group(content)
    if group.size > 1:
        forget_segment_names()
    source = open_dataset(config)
    found = scan_shapes(source, config, model_config, config.data.shape_cache)
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
    if config.train.export_dir is not None:
        named = (config.train.output_dir, config.model.path, config.data.train_path, config.data.eval_path)
        kept = [Path(path) for path in named if path is not None]
        require_replaceable(Path(config.train.export_dir), kept)
    wanted = {
        "dflop.train.output_dir": Path(config.train.output_dir),
        "dflop.train.save_every": config.train.save_every and Path(config.train.output_dir) / "checkpoints",
        "dflop.train.export_dir": config.train.export_dir and Path(config.train.export_dir).parent,
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
    return scan_shapes(open_dataset(config), lenient, read_model_config(config), str(cache))


def stages_for_report(
    ds_config: dict[str, Any], config: DflopConfig, table: ProfileTable, num_stages: int
) -> tuple[ModelDims, list[list[str]]]:
    """Dimensions of the model and its layer kinds by stage, balanced for the profiled microbatches.

    Raises
    ------
    CostModelError
        If the profile is of another model, or `cost.on_other_conditions` refuses it.
    """
    model_config = read_model_config(config)
    content = model_content(model_config)
    table.check_matches(costs.fingerprint(ds_config, config, content), config.cost.on_other_conditions)
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
            "the number of ranks must be a multiple of dflop.parallel.pipeline_stages, found "
            f"{world_size} ranks for {stages} stages; change one of them."
        )
    return int(stages)


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
    content = model_content(model_config)
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
