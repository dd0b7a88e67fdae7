"""Checks of command-line arguments: what makes no sense, or cannot be written, is found before the work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from dflop_ds.errors import ConfigError


def whole_number(least: int) -> Callable[[str], int]:
    """Parser of whole numbers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, found {text!r}")
        return value

    return parse


def seconds(text: str) -> float:
    """A finite time of at least 0 s."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds of at least 0, found {text!r}")
    return value


def check_writable(path: Path, option: str) -> None:
    """Make the folder of a file that a verb writes at its end.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink(missing_ok=True)  # every rank of a launcher may check
    except OSError as error:
        raise ConfigError(
            f"{option} must be a file that can be written, found {path}: {error.strerror}. Give another."
        ) from error
