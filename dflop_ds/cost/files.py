"""Artifacts of the cost model as JSON files: whole, versioned, checked."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop_ds.errors import CostModelError


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write an artifact in one step: readers see the old file or the whole new one."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, allow_nan=False, default=operator.index), encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read one JSON object; :class:`CostModelError` if the file is missing, truncated or not an object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CostModelError(f"{path} must be a readable {what} (JSON); {error}. Write it again.") from error
    if not isinstance(content, dict):
        raise CostModelError(f"{path} must be one {what}, found a {type(content).__name__}. Write it again.")
    return content


def check_schema(content: Mapping[str, Any], what: str, supported: int) -> None:
    """Raise :class:`CostModelError` unless an artifact has the supported ``schema_version``."""
    found = content.get("schema_version")
    if found != supported:
        newer = isinstance(found, int) and found > supported
        remedy = "Upgrade dflop_ds" if newer else "Write it again with this version"
        raise CostModelError(f"a {what} must have schema_version {supported}, found {found!r}. {remedy}.")
