"""From a running engine, or from a checkpoint on disk, to a Hugging Face directory."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from transformers import AutoConfig

from dflop_ds.errors import ConfigError
from dflop_ds.families import family_of, import_families
from dflop_ds.models import lora
from dflop_ds.models.export import MAX_SHARD_BYTES, HuggingFaceWriter, Shapes
from dflop_ds.models.weights import named_weights
from dflop_ds.runtime import compat, distributed
from dflop_ds.runtime.saved import SavedCheckpoint

logger = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_engine(engine: Any, source: str | Path, out: str | Path, dtype: str = "as_trained") -> None:
    """Write the model as it is now, adapters merged; every stage writes its own layers. A collective call.

    Parameters
    ----------
    engine : PipelineEngine
        Of a :class:`~dflop_ds.runtime.module.DflopPipelineModule`.
    source : str or Path
        Directory that training began with.
    out : str or Path
        What it held before is replaced.
    dtype : {"as_trained", "bf16", "fp32"}
        With bf16 training, fp32 means the master weights of the optimizer.

    Raises
    ------
    ModelError
        If there are weights that the ``transformers`` model does not have.
    """
    source, out, module = Path(source), Path(out), engine.module
    first = dist.get_rank() == 0
    own = {name: p for layer in module.local_layers() for name, p in named_weights(layer).items()}
    masters = dtype == "fp32" and engine.optimizer is not None and compat.keeps_partitions(engine.optimizer)
    wanted = _DTYPES.get(dtype, next(iter(own.values())).dtype)
    stages = distributed.together(lambda: _shapes_by_stage(module))
    unfinished = _unfinished(out)
    distributed.together(lambda: _start(unfinished) if first else None)
    writer = distributed.together(lambda: _writer(unfinished, source, stages, wanted, MAX_SHARD_BYTES))

    def weight(name: str) -> torch.Tensor:
        if masters and hasattr(own[name], "_hp_mapping"):
            return safe_get_full_fp32_param(own[name])
        return own[name].detach()

    adapters = None if module.finetuning is None else module.finetuning.adapters
    merged = lora.merged(weight, own, None if adapters is None else adapters.scale)
    if engine.grid.get_data_parallel_rank() == 0:
        distributed.together(lambda: writer.write_stage(engine.stage_id, merged))
    else:
        # The partitions of a master weight are put together by all replicas, in the order of writing.
        distributed.together(lambda: [merged(name) for name in writer.order(engine.stage_id) if masters])
    distributed.together(lambda: _finish(writer, out) if first else None)


def export_checkpoint(
    directory: Path,
    out: Path,
    *,
    source: Path | None = None,
    dtype: str = "as_trained",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write the model of a checkpoint, in one process that holds one file's weights at a time.

    Adapters are merged.

    Parameters
    ----------
    directory : Path
        One checkpoint.
    out : Path
    source : Path, optional
        Directory that training began with; by default the one that the checkpoint names.
    dtype : {"as_trained", "bf16", "fp32"}
    max_shard_bytes : int
    overwrite : bool
        Replace what `out` holds.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    ConfigError
        If `out` is in use or the directory that training began with is gone.
    ModelError
        If the checkpoint is incomplete, or has weights that the ``transformers`` model does not have.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not overwrite:
        raise ConfigError(f"{out} must be new or empty, found files; choose another or pass --overwrite.")
    saved = SavedCheckpoint(directory)
    source = source or Path(saved.main["model"] or "")
    require_replaceable(out, [directory, source])
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"the model directory that training began with must hold config.json, found none in {source}; "
            "name it with --model."
        )
    import_families(saved.main["family_module"])
    saved.require_files(weights_only=dtype != "fp32")
    places, scale = saved.weights(), saved.main.get("adapter_scale")
    names = [name for name in places if scale is None or not lora.is_adapter(name)]
    shapes = {name: tuple(saved.weight(*places[name]).shape) for name in names}
    wanted = _DTYPES.get(dtype, saved.weight(*next(iter(places.values()))).dtype)

    def weight(name: str) -> torch.Tensor:
        value = saved.weight(*places[name])
        master = saved.master(*places[name]) if dtype == "fp32" and value.dtype != torch.float32 else None
        return value if master is None else master.view_as(value)

    unfinished = _unfinished(out)
    _start(unfinished)
    writer = _writer(unfinished, source, [shapes], wanted, max_shard_bytes)
    writer.write_stage(0, lora.merged(weight, places, scale))
    _finish(writer, out)
    return out


def require_replaceable(out: Path, kept: Iterable[Path]) -> None:
    """Make sure that a directory may be replaced by an export.

    Parameters
    ----------
    out : Path
    kept : iterable of Path
        What must still be there afterwards.

    Raises
    ------
    ConfigError
        If it is the folder of something that is kept, or holds something else than an export.
    """
    place = out.resolve()
    lost = [path for path in kept if place == path.resolve() or place in path.resolve().parents]
    if lost:
        raise ConfigError(
            f"an export replaces what its directory holds, found {lost[0]} in {out}; choose another one."
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"an export must go to a directory, found a link or file, {out}; choose another.")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ConfigError(
            f"an export replaces what its directory holds, found other files than a model's in {out}; "
            "empty it, or choose another directory."
        )


def _shapes_by_stage(module: Any) -> list[Shapes]:
    """Shapes of the weights of every stage, without building them."""
    bounds = [int(bound) for bound in module.parts]
    stages: list[Shapes] = []
    with torch.device("meta"):
        for start, stop in itertools.pairwise(bounds):
            layers = [module.plans[index].build() for index in range(start, stop)]
            stages.append({n: tuple(p.shape) for layer in layers for n, p in named_weights(layer).items()})
    return stages


def _writer(
    directory: Path, source: Path, stages: list[Shapes], dtype: torch.dtype, max_shard_bytes: int
) -> HuggingFaceWriter:
    model_config = AutoConfig.from_pretrained(source, local_files_only=True)
    content = json.loads(model_config.to_json_string(use_diff=False))
    return HuggingFaceWriter(
        directory,
        source,
        model_config,
        stages,
        dtype,
        published_names=family_of(content).published_names,
        max_shard_bytes=max_shard_bytes,
    )


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.unfinished")


def _start(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _finish(writer: HuggingFaceWriter, out: Path) -> None:
    """Complete the export, and give it its name."""
    writer.write_rest()
    earlier = out.with_name(f".{out.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if out.exists():
        out.rename(earlier)
    writer.directory.rename(out)
    shutil.rmtree(earlier, ignore_errors=True)
    logger.info("wrote the model in Hugging Face format to %s", out)
