"""Types of command-line arguments: values that make no sense end with the usage, before anything is read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


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
