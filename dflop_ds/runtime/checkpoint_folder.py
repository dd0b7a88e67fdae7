"""Checkpoints as folders on a disk: temporary names, the pointer to the latest one, and old ones."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflop_ds.errors import EnvironmentProblem, ModelError
from dflop_ds.runtime.saved import MAIN_FILE, SavedCheckpoint

logger = logging.getLogger(__name__)

LATEST = "latest"
UNFINISHED = ".saving-"
_REPLACED = ".replaced-"
_OLD = ".removing-"


def forget_unfinished(folder: Path) -> None:
    """Remove what a run that was killed while it saved has left; no complete checkpoint is touched."""
    for left in folder.glob(f"{UNFINISHED}*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()  # the pointer that was to become `latest`
    for left in folder.glob(f"{_OLD}*"):
        shutil.rmtree(left)
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
        if is_plain(tag) and directory.is_dir():
            if SavedCheckpoint.is_damaged(directory):
                raise ModelError(
                    f"{directory} must hold {MAIN_FILE}, found none: without it the position in the data is "
                    "lost; name another checkpoint."
                )
            return directory
    there = sorted(path.name for path in _complete(folder))
    raise ModelError(
        f"{folder} must hold the checkpoint {tag!r}, found {there or 'none'}; name another tag, or correct "
        f"or remove {LATEST!r}."
    )


def is_plain(tag: str) -> bool:
    """Whether a tag is the name of one visible folder."""
    return bool(tag) and not tag.startswith(".") and "/" not in tag and "\0" not in tag


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if is_plain(path.name) and SavedCheckpoint.exists(path)]


def _without_pointer(folder: Path) -> Path | None:
    """The checkpoint that trained longest, where a crash came before the first one was made the latest."""
    found = _complete(folder)
    if not found:
        return None
    newest = max(found, key=lambda directory: (SavedCheckpoint(directory).num_steps, directory.name))
    logger.warning("%s names no checkpoint in %r: %s is taken", folder, LATEST, newest.name)
    return newest


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
    unfinished, final, replaced = (folder / f"{prefix}{tag}" for prefix in (UNFINISHED, "", _REPLACED))
    for path in [*unfinished.iterdir(), unfinished]:
        _flush(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    _flush(folder)
    if save_latest:
        pointer = folder / f"{UNFINISHED}{LATEST}"
        pointer.write_text(tag, encoding="utf-8")
        _flush(pointer)
        pointer.replace(folder / LATEST)
        _flush(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def forget_old(folder: Path, tag: str, num_kept: int) -> None:
    """Remove all but the newest checkpoints of a run, once another is complete.

    Only those named by their step are counted and removed, none of a later step, and not the one that
    ``latest`` names. What cannot be removed stays, with a warning.

    Parameters
    ----------
    folder : Path
    tag : str
        The checkpoint that is complete now.
    num_kept : int
        How many stay, this one included.
    """
    own_step = _step_of(tag)
    if own_step is None:
        return
    steps = {path: _step_of(path.name) for path in _complete(folder)}
    older = sorted((step, path) for path, step in steps.items() if step is not None and step <= own_step)
    latest = folder / LATEST
    named = latest.read_text(encoding="utf-8") if latest.is_file() else ""
    for _, path in older[:-num_kept]:
        if path.name == named:
            continue
        try:
            # Under another name a half removed one is not taken for a checkpoint.
            shutil.rmtree(path.rename(folder / f"{_OLD}{path.name}"))
        except OSError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)


def _step_of(tag: str) -> int | None:
    found = re.fullmatch(r"global_step(\d+)", tag)
    return int(found[1]) if found else None


def _flush(path: Path) -> None:
    """Make sure that a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
