"""Reading the records of a data set: a JSON list, or JSON lines at remembered offsets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import DataError


class Records(Protocol):
    """Records by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """The decoded record; any JSON value."""

    def fallback_id(self, index: int) -> str:
        """Identifier of a record that names none."""


def open_records(path: str | Path) -> Records:
    """Open ``.json`` (a list) or ``.jsonl`` (one record a line).

    Raises
    ------
    DataError
        If the file is missing, of another kind, or not a JSON list.
    """
    path = Path(path)
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(f"records must be a .json or .jsonl file, found {path}; convert them.")
    if not path.is_file():
        raise DataError(f"the records file {path} must exist, found no such file; correct the path.")
    return JsonLines(path) if path.suffix == ".jsonl" else JsonList(path)


class JsonList:
    """Records of a JSON file that holds one list.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        try:
            records = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} must be valid JSON, found {error}; correct it.") from error
        if not isinstance(records, list):
            raise DataError(
                f"{path} must hold a list of records, found {type(records).__name__}; convert it."
            )
        self._records: list[Any] = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]

    def fallback_id(self, index: int) -> str:
        """Position in the list, from 0."""
        return f"record {index}"


class JsonLines:
    """Records of a file with one JSON value a line, read when asked for.

    The file is opened anew in every process that reads: a handle shared by forked data loader
    workers would share its position as well.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        offsets, lines = [], []
        offset = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    offsets.append(offset)
                    lines.append(number)
                offset += len(line)
        self._offsets: npt.NDArray[np.int64] = np.array(offsets, dtype=np.int64)
        self._lines: npt.NDArray[np.int64] = np.array(lines, dtype=np.int64)
        self._file: BinaryIO | None = None
        self._owner_pid = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Any:
        if self._file is None or self._owner_pid != os.getpid():
            self._file = open(self._path, "rb")  # noqa: SIM115 - kept open between reads
            self._owner_pid = os.getpid()
        self._file.seek(int(self._offsets[index]))
        try:
            return json.loads(self._file.readline())
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self._path} must hold valid JSON in every "
                f"line, found {error}; correct or delete the line.",
                self.fallback_id(index),
            ) from error

    def fallback_id(self, index: int) -> str:
        """Line number, from 1, as an editor shows it."""
        return f"line {int(self._lines[index])}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
