"""Checkpoints that a crash cannot damage, and from which a run goes on as if nothing had happened.

DeepSpeed writes its own files into a folder with a temporary name; beside them lie ``dflop.json`` (layout,
position in the data, plans, correction) and one ``dflop-rank*.json`` per rank. The folder then gets its name,
and ``latest`` names it last.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflop_ds
from dflop_ds.errors import ConfigError, ModelError
from dflop_ds.models.weights import named_weights
from dflop_ds.runtime import compat, distributed, optimizer_state, random_state
from dflop_ds.runtime.checkpoint_folder import (
    LATEST,
    UNFINISHED,
    find,
    forget_old,
    forget_unfinished,
    is_plain,
    naming_folder,
    publish,
)
from dflop_ds.runtime.saved import MAIN_FILE, RANK_FILES, SavedCheckpoint, write_checked
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.position import SamplerPosition

logger = logging.getLogger(__name__)


def save(
    engine: Any, write: Callable[..., Any], folder: Path, tag: str, *, save_latest: bool, **options: Any
) -> Any:
    """Save a checkpoint; a collective call.

    Parameters
    ----------
    engine : DflopPipelineEngine
    write : callable
        DeepSpeed's own ``save_checkpoint``.
    folder : Path
        Holds the checkpoints of a run.
    tag : str
        Name of this one, the same on every rank.
    save_latest : bool
        Let ``latest`` name it.
    **options
        Passed to ``write``.

    Raises
    ------
    ConfigError
        If DeepSpeed is configured to write in the background, or the tag is no plain name.
    EnvironmentProblem
        If the folder cannot be written, or is full.
    """
    if not compat.saves_at_once(engine):
        raise ConfigError(
            'DeepSpeed must write checkpoints at once, found a decoupled "checkpoint" engine; remove '
            '"checkpoint.writer" from the configuration.'
        )
    if not is_plain(tag) or tag == LATEST:
        raise ConfigError(f"the tag of a checkpoint must be a plain name, found {tag!r}; choose another.")
    keeper = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
    unfinished = folder / f"{UNFINISHED}{tag}"

    def begin() -> None:
        with naming_folder(folder):
            forget_unfinished(folder)
            unfinished.mkdir(parents=True, exist_ok=True)

    def finish() -> None:
        with naming_folder(folder):
            publish(folder, tag, save_latest)
        kept = None if engine.data_plan is None else engine.data_plan.config.train.keep_last
        if kept is not None:
            forget_old(folder, tag, kept)

    distributed.together(begin if keeper else lambda: None)
    stream = json.loads(distributed.on_first_rank(lambda: json.dumps(_stream_state(engine)).encode()))
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = later = _FailsLater(writer)
    try:
        result = write(str(folder), tag=unfinished.name, save_latest=False, **options)
    finally:
        engine.checkpoint_engine = writer
    distributed.together(lambda: _write_own_files(engine, unfinished, keeper, stream, later.error))
    distributed.together(finish if keeper else lambda: None)
    return result


class _FailsLater:
    """DeepSpeed's writer, except that an error is kept until all ranks have written.

    DeepSpeed waits for all ranks in the end: one that fails before would leave the others there.
    """

    def __init__(self, writer: Any) -> None:
        self.error: Exception | None = None
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, unless one has failed already."""
        if self.error is None:
            try:
                self._writer.save(state_dict, path)
            except (OSError, RuntimeError) as error:
                self.error = error


def load(
    engine: Any,
    read: Callable[..., Any],
    folder: Path,
    tag: str | None,
    *,
    weights_only: bool,
    with_optimizer: bool,
    **options: Any,
) -> Any:
    """Load a checkpoint, written with any number of stages and replicas; a collective call.

    Parameters
    ----------
    engine : DflopPipelineEngine
    read : callable
        DeepSpeed's own ``load_checkpoint``.
    folder : Path
        Holds the checkpoints of a run, or is one.
    tag : str or None
        By default the one that ``latest`` names.
    weights_only : bool
        Neither optimizer state nor position.
    with_optimizer : bool
        Also optimizer state.
    **options
        Passed to ``read``.

    Raises
    ------
    ModelError
        If the checkpoint is incomplete or of another model.
    ConfigError
        If the run would go through other samples.
    """
    directory = distributed.together(lambda: find(folder, tag))
    if directory is None or not SavedCheckpoint.exists(directory):
        # Written by DeepSpeed alone: no position, and its own rules.
        if directory is not None and not weights_only:
            logger.warning("%s has no position in the data: the samples begin anew", directory)
        return read(
            str(folder), tag, load_module_only=weights_only, load_optimizer_states=with_optimizer, **options
        )
    strict, with_optimizer = options["load_module_strict"], with_optimizer and not weights_only
    saved = distributed.together(lambda: _whole(engine, directory, weights_only))
    distributed.together(lambda: _require_same_run(engine, saved, strict, weights_only, with_optimizer))
    options |= {"load_module_only": weights_only, "load_optimizer_states": False}
    new_schedule = engine.lr_scheduler is not None and saved.main.get("has_schedule") is False
    if new_schedule and not weights_only:
        logger.warning("%s has no learning rate schedule: it begins anew", directory)
        options["load_lr_scheduler_states"] = False
    try:
        result = read(str(directory.parent), directory.name, **options)
    except RuntimeError as error:  # other shapes or names than those of the model
        raise ModelError(
            f"the checkpoint {directory} must be whole and of this model, found {error}; name another one."
        ) from error
    if weights_only:
        return result
    if engine.optimizer is not None and compat.keeps_partitions(engine.optimizer):
        # Of a bf16 pipeline without ZeRO, DeepSpeed forgets the fp32 copies.
        engine.optimizer.refresh_fp32_params()
    if with_optimizer:
        distributed.together(lambda: optimizer_state.restore(engine, saved, keep_rates=new_schedule))
    _restore_progress(engine, saved)
    return result


def _stream_state(engine: Any) -> dict[str, Any] | None:
    """Where a stream is, and the window that is being trained (rank 0)."""
    if engine.data_plan is None or engine.data_plan.records is None:
        return None
    state: dict[str, Any] = engine.data_plan.planner.state(engine.feed.step)
    return state


def _write_own_files(
    engine: Any, directory: Path, keeper: bool, stream: dict[str, Any] | None, error: Exception | None
) -> None:
    with naming_folder(directory.parent):
        if error is not None:
            raise error
        write_checked(directory / RANK_FILES.format(engine.global_rank), _of_rank(engine))
        if keeper:
            write_checked(directory / MAIN_FILE, {**_of_run(engine), "stream": stream})


def _of_run(engine: Any) -> dict[str, Any]:
    """What is the same on every rank."""
    feed = engine.feed
    position = None if feed is None else SamplerPosition.of(engine.data_plan.planner, feed.step)
    model = None if engine.data_plan is None else engine.data_plan.config.model
    finetuning = engine.module.finetuning
    adapters = None if finetuning is None else finetuning.adapters
    return {
        "dflop_ds": dflop_ds.__version__,
        "num_ranks": engine.world_size,
        "model": model and model.path and str(Path(model.path).resolve()),
        "family_module": model and model.family_module,
        "adapter_scale": None if adapters is None else adapters.scale,
        "layout": {
            "boundaries": [int(bound) for bound in engine.module.parts],
            "num_replicas": engine.dp_world_size,
            "layer_kinds": engine.module.layer_kinds,
            "tied_keys": [plan.tied_key for plan in engine.module.plans],
        },
        "position": position and dataclasses.asdict(position),
        "plans": [] if feed is None else [plan.encode().tolist() for plan in feed.plans],
        "has_schedule": engine.lr_scheduler is not None,
        "correction": None if engine.adaptive is None else engine.adaptive.state_dict(),
    }


def _of_rank(engine: Any) -> dict[str, Any]:
    """What belongs to one rank."""
    feed, telemetry = engine.feed, engine.telemetry
    return {
        "stage": engine.stage_id,
        "replica": engine.grid.get_data_parallel_rank(),
        "layers": engine.module.weight_names(),
        "optimizer": optimizer_state.describe(engine),
        "random": random_state.capture(engine.device),
        "planning": None if feed is None else dataclasses.asdict(feed.stats),
        "num_measured_steps": 0 if telemetry is None else telemetry.num_steps,
    }


def _whole(engine: Any, directory: Path, weights_only: bool) -> SavedCheckpoint:
    """Open a checkpoint of which nothing is missing or damaged; the ranks share the reading."""
    saved = SavedCheckpoint(directory)
    saved.require_files(engine.global_rank, engine.world_size, weights_only=weights_only)
    return saved


def _require_same_run(
    engine: Any, saved: SavedCheckpoint, strict: bool, weights_only: bool, with_optimizer: bool
) -> None:
    """Make sure that this run can go on from a checkpoint."""
    _require_same_layers(engine.module, saved)
    if strict:
        _require_same_weights(engine.module, saved)
    if with_optimizer:
        optimizer_state.require_same_kind(engine, saved)
    if saved.main["position"] is None or engine.feed is None or weights_only:
        return
    position = SamplerPosition.from_json(saved.main["position"])
    position.require_same_sequence(SamplerPosition.of(engine.data_plan.planner, position.step))
    if (saved.main.get("stream") is None) != (engine.data_plan.records is None):
        raise ConfigError(
            "a run over a stream must be resumed with a stream, and any other without, found the "
            "opposite; change the training data back."
        )


def _require_same_layers(module: Any, saved: SavedCheckpoint) -> None:
    kinds = saved.main["layout"]["layer_kinds"]
    if kinds != module.layer_kinds:
        raise ModelError(
            f"the checkpoint {saved.directory} must be of a model with the {len(module.layer_kinds)} layers "
            f"of this one, found {len(kinds)} layers; start from what `dflop-ds export` makes of it."
        )


def _require_same_weights(module: Any, saved: SavedCheckpoint) -> None:
    """Make sure that the layers of this rank have the weights of the checkpoint, adapters included."""
    weights = [item for layer in module.local_layers() for item in named_weights(layer).items()]
    own = {name: tuple(parameter.shape) for name, parameter in weights}
    local = set(module.weight_names())
    places = {name: place for name, place in saved.weights().items() if name in own or place[0] in local}
    theirs = {name: tuple(saved.weight(*place).shape) for name, place in places.items()}
    changed = [
        f"{name} of shape {theirs.get(name)} instead of {own.get(name)}"
        for name in sorted({*own, *theirs})
        if own.get(name) != theirs.get(name)
    ]
    if changed:
        raise ModelError(
            f"the checkpoint {saved.directory} must have the weights of this model, found {changed[0]} and "
            f"{len(changed) - 1} other differences; change the model or dflop.finetune.lora back, or start "
            "from what `dflop-ds export` makes of the checkpoint."
        )


def _restore_progress(engine: Any, saved: SavedCheckpoint) -> None:
    position, feed = saved.main["position"], engine.feed
    if engine.adaptive is not None and saved.main["correction"] is not None:
        engine.adaptive.load_state_dict(saved.main["correction"])
    if position is not None and feed is not None:
        _restore_stream(engine, saved)
        plans = [StepPlan.decode(plan) for plan in saved.main["plans"]]
        valid = all(engine.data_plan.planner.accepts(plan) for plan in plans)
        feed.go_to(position["step"], plans if valid else [])
        engine.restart_after(position["step"])
    if len(saved.ranks) != engine.world_size:
        return
    own = saved.ranks[engine.global_rank]
    if feed is not None and own["planning"] is not None:
        feed.stats = type(feed.stats)(**own["planning"])
    if engine.telemetry is not None:
        engine.telemetry.num_steps = own["num_measured_steps"]
    random_state.restore(own["random"], engine.device)


def _restore_stream(engine: Any, saved: SavedCheckpoint) -> None:
    """Bring the stream to the window that was being trained, on every rank."""
    stream, records = saved.main.get("stream"), engine.data_plan.records
    if records is None or stream is None:
        return
    engine.feed.close()
    engine.data_plan.planner.restore(stream)
    distributed.together(lambda: records.restore(stream["records"]))
