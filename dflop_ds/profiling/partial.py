"""The microbatches of an unfinished profile, one JSON line each."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from dflop_ds.cost.features import ProfileRow, check_rows
from dflop_ds.errors import CostModelError
from dflop_ds.profiling.table import ProfileLimit

logger = logging.getLogger(__name__)

Found = tuple[list[ProfileRow], list[ProfileLimit]]


class PartialProfile:
    """Keeps what has been measured, so that an interrupted profile can go on.

    Parameters
    ----------
    path : Path
        Created when needed. Lines of another key, and a line cut short by the interruption, are ignored.
    key : str
        What the measurements depend on.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key = hashlib.sha256(key.encode()).hexdigest()
        self._found: dict[int, Found] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)
        if self._found:
            logger.info("%d shapes of an interrupted profile are taken from %s", len(self._found), path)

    def get(self, number: int) -> Found | None:
        """Measurements of microbatch `number`, or None."""
        return self._found.get(number)

    def append(self, number: int, rows: Sequence[ProfileRow], limits: Sequence[ProfileLimit]) -> None:
        """Keep the measurements of one microbatch."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(
            {
                "key": self._key,
                "number": number,
                "rows": [dataclasses.asdict(row) for row in rows],
                "limits": [dataclasses.asdict(limit) for limit in limits],
            }
        )
        with self.path.open("a", encoding="utf-8") as file:
            # The newline comes first: a line that was cut short then spoils only itself.
            file.write("\n" + line)

    def _read(self, line: str) -> None:
        try:
            content = json.loads(line)
            rows = [ProfileRow(**row) for row in content["rows"]]
            limits = [ProfileLimit(**limit) for limit in content["limits"]]
            number, key = int(content["number"]), content["key"]
            if rows:
                check_rows(rows)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, CostModelError):
            return
        if key == self._key:
            self._found[number] = (rows, limits)
