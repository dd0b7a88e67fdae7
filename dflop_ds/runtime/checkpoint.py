"""Checkpoints that a crash cannot damage, and from which a run goes on as if nothing had happened.

DeepSpeed writes its own files into a folder with a temporary name; beside them lie ``dflop.json`` (layout,
position in the data, plans, correction) and one ``dflop-rank*.json`` per rank. The folder then gets its name,
and ``latest`` names it last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dflop_ds
from dflop_ds.errors import ConfigError, EnvironmentProblem, ModelError
from dflop_ds.runtime import compat, distributed, optimizer_state, random_state
from dflop_ds.runtime.saved import MAIN_FILE, RANK_FILES, SCHEMA_VERSION, SavedCheckpoint
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.position import SamplerPosition

logger = logging.getLogger(__name__)

LATEST = "latest"
_UNFINISHED = ".saving-"
_REPLACED = ".replaced-"


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
    if not _is_plain(tag) or tag == LATEST:
        raise ConfigError(f"the tag of a checkpoint must be a plain name, found {tag!r}; choose another.")
    keeper = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
    unfinished = folder / f"{_UNFINISHED}{tag}"
    # DeepSpeed waits for all ranks inside: one that fails ends here, and the launcher ends the others.
    with naming_folder(folder):
        if keeper:
            forget_unfinished(folder)
        result = write(str(folder), tag=unfinished.name, save_latest=False, **options)
    stream = json.loads(distributed.on_first_rank(lambda: json.dumps(_stream_state(engine)).encode()))
    distributed.together(lambda: _write_own_files(engine, unfinished, keeper, stream))

    def finish() -> None:
        with naming_folder(folder):
            publish(folder, tag, save_latest)

    distributed.together(finish if keeper else lambda: None)
    return result


def forget_unfinished(folder: Path) -> None:
    """Remove what a run that was killed while it saved has left; no complete checkpoint is touched."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()  # the pointer that was to become `latest`
    for left in folder.glob(f"{_REPLACED}*"):
        if SavedCheckpoint.exists(folder / left.name.removeprefix(_REPLACED)):
            shutil.rmtree(left)


@contextlib.contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while a checkpoint is written into one error.

    Raises
    ------
    EnvironmentProblem
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a disk is full
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise EnvironmentProblem(
            f"{folder} must be a folder that can be written, with space for a checkpoint, found {found}; "
            "free space or change the folder. Earlier checkpoints in it are untouched."
        ) from error


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
    saved = distributed.together(lambda: _checked(engine, directory, weights_only))
    options |= {"load_module_only": weights_only, "load_optimizer_states": False}
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
        distributed.together(lambda: optimizer_state.restore(engine, saved))
    _restore_progress(engine, saved)
    return result


def find(folder: Path, tag: str | None = None) -> Path | None:
    """Directory of a checkpoint; None if there is none.

    Parameters
    ----------
    folder : Path
        Holds the checkpoints of a run, or is one.
    tag : str, optional
        By default the one that ``latest`` names.

    Raises
    ------
    ModelError
        If ``latest`` or `tag` names one that does not exist.
    """
    if tag is None:
        if SavedCheckpoint.exists(folder):
            return folder
        if not (folder / LATEST).is_file():
            return _without_pointer(folder)
        tag = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    # A crash between the two renames of a replacement leaves the old one under its second name.
    for directory in (folder / tag, folder / f"{_REPLACED}{tag}"):
        if _is_plain(tag) and directory.is_dir():
            if SavedCheckpoint.is_damaged(directory):
                raise ModelError(
                    f"{directory} must hold {MAIN_FILE}, found none: without it the position in the data is "
                    "lost; name another checkpoint."
                )
            return directory
    raise ModelError(
        f"{folder} must hold the checkpoint {tag!r}, found none; name another tag, or correct {LATEST!r}."
    )


def _is_plain(tag: str) -> bool:
    return bool(tag) and not tag.startswith(".") and "/" not in tag and "\0" not in tag


def _without_pointer(folder: Path) -> Path | None:
    """The checkpoint that trained longest, where a crash came before the first one was made the latest."""
    found = [path for path in folder.glob("*") if _is_plain(path.name) and SavedCheckpoint.exists(path)]
    if not found:
        return None
    newest = max(found, key=lambda directory: (SavedCheckpoint(directory).num_steps, directory.name))
    logger.warning("%s names no checkpoint in %r: %s is taken", folder, LATEST, newest.name)
    return newest


def _stream_state(engine: Any) -> dict[str, Any] | None:
    """Where a stream is, and the window that is being trained (rank 0)."""
    if engine.data_plan is None or engine.data_plan.records is None:
        return None
    state: dict[str, Any] = engine.data_plan.planner.state(engine.feed.step)
    return state


def _write_own_files(engine: Any, directory: Path, keeper: bool, stream: dict[str, Any] | None) -> None:
    with naming_folder(directory.parent):
        _write_json(directory / RANK_FILES.format(engine.global_rank), _of_rank(engine))
        if keeper:
            _write_json(directory / MAIN_FILE, {**_of_run(engine), "stream": stream})


def publish(folder: Path, tag: str, save_latest: bool) -> None:
    """Give a complete checkpoint its name, and then name it in ``latest``.

    Parameters
    ----------
    folder : Path
        Holds ``.saving-<tag>``, which all ranks have written.
    tag : str
        A checkpoint of this name is replaced.
    save_latest : bool
    """
    unfinished, final, replaced = (folder / f"{prefix}{tag}" for prefix in (_UNFINISHED, "", _REPLACED))
    for path in [*unfinished.iterdir(), unfinished]:
        _flush(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    _flush(folder)
    if save_latest:
        pointer = folder / f"{_UNFINISHED}{LATEST}"
        pointer.write_text(tag, encoding="utf-8")
        _flush(pointer)
        pointer.replace(folder / LATEST)
        _flush(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _of_run(engine: Any) -> dict[str, Any]:
    """What is the same on every rank."""
    feed = engine.feed
    position = None if feed is None else SamplerPosition.of(engine.data_plan.planner, feed.step)
    model = None if engine.data_plan is None else engine.data_plan.config.model
    return {
        "schema_version": SCHEMA_VERSION,
        "dflop_ds": dflop_ds.__version__,
        "num_ranks": engine.world_size,
        "model": model and model.path and str(Path(model.path).resolve()),
        "family_module": model and model.family_module,
        "layout": {
            "boundaries": [int(bound) for bound in engine.module.parts],
            "num_replicas": engine.dp_world_size,
            "layer_kinds": engine.module.layer_kinds,
            "tied_keys": [plan.tied_key for plan in engine.module.plans],
        },
        "position": position and dataclasses.asdict(position),
        "plans": [] if feed is None else [plan.encode().tolist() for plan in feed.plans],
        "correction": None if engine.adaptive is None else engine.adaptive.state_dict(),
    }


def _of_rank(engine: Any) -> dict[str, Any]:
    """What belongs to one rank."""
    feed, telemetry = engine.feed, engine.telemetry
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": engine.stage_id,
        "replica": engine.grid.get_data_parallel_rank(),
        "layers": engine.module.weight_names(),
        "optimizer": optimizer_state.describe(engine),
        "random": random_state.capture(engine.device),
        "planning": None if feed is None else dataclasses.asdict(feed.stats),
        "num_measured_steps": 0 if telemetry is None else telemetry.num_steps,
    }


def _checked(engine: Any, directory: Path, weights_only: bool) -> SavedCheckpoint:
    """Open a checkpoint and make sure that this run can go on from it."""
    saved = SavedCheckpoint(directory)
    saved.require_files()
    kinds = saved.main["layout"]["layer_kinds"]
    if kinds != engine.module.layer_kinds:
        raise ModelError(
            f"the checkpoint {directory} must be of a model with the {len(engine.module.layer_kinds)} layers "
            f"of this one, found {len(kinds)} layers; start from what `dflop-ds export` makes of it."
        )
    if saved.main["position"] is not None and engine.feed is not None and not weights_only:
        position = SamplerPosition.from_json(saved.main["position"])
        position.require_same_sequence(SamplerPosition.of(engine.data_plan.planner, position.step))
        if (saved.main.get("stream") is None) != (engine.data_plan.records is None):
            raise ConfigError(
                "a run over a stream must be resumed with a stream, and any other without, found the "
                "opposite; change the training data back."
            )
    return saved


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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _flush(path: Path) -> None:
    """Make sure that a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
