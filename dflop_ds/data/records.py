"""Reading the records of a data set: a JSON list, JSON lines at remembered offsets, or a mixture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from dflop_ds.data.hub_records import HubRecords, load_hub_set
from dflop_ds.data.mixture import MIXTURE_KEY, Mixture, load_mixture_file
from dflop_ds.errors import DataError

_MIXTURE_SUFFIXES = (".yaml", ".yml")


class Records(Protocol):
    """Records by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """The decoded record; any JSON value."""

    def fallback_id(self, index: int) -> str:
        """Identifier of a record that names none."""

    def fingerprint(self) -> list[Any]:
        """Values for JSON that change whenever the records may have changed."""


def open_records(path: str | Path, seed: int = 0) -> Records:
    """Open ``.json`` (a list), ``.jsonl`` (one record a line), a mixture (``.yaml``, or ``.json``), or a
    data set that ``datasets`` has saved (a folder, or ``.parquet``).

    Parameters
    ----------
    path : str or Path
    seed : int
        Decides what a mixture draws.

    Raises
    ------
    DataError
        If the file is missing, of another kind, or neither a JSON list nor a mixture.
    """
    path = Path(path)
    if os.path.isdir(path) or path.suffix == ".parquet":
        return HubRecords(load_hub_set(path))
    if path.suffix in _MIXTURE_SUFFIXES:
        _check_exists(path)
        return Mixture(path, load_mixture_file(path), seed=seed, open_file=_open_file)
    records = _open_file(path, may_be_mixture=True)
    if isinstance(records, Mapping):
        return Mixture(path, records, seed=seed, open_file=_open_file)
    return records


def _open_file(path: Path, may_be_mixture: bool = False) -> Any:
    """Records of one file; the content of a mixture file where one may stand here."""
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(
            f"records must be a .json or .jsonl file, a mixture in .yaml, .parquet or a folder that datasets "
            f"has saved, found {path}; convert them."
        )
    _check_exists(path)
    if path.suffix == ".jsonl":
        return JsonLines(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} must be valid JSON, found {error}; correct it.") from error
    if may_be_mixture and isinstance(content, Mapping) and MIXTURE_KEY in content:
        return content
    return JsonList(path, content)


def _check_exists(path: Path) -> None:
    try:
        if path.is_file() and os.access(path, os.R_OK):
            return
        found = "one that may not be read" if path.exists() else "no such file"
    except OSError as error:  # e.g. a name that is too long
        found = str(error)
    raise DataError(f"the records file {path} must exist, found {found}; correct the path.")


def _file_fingerprint(path: Path) -> list[Any]:
    """Path, size and modification time."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


class JsonList:
    """Records of a JSON file that holds one list.

    Parameters
    ----------
    path : Path
    records : object
        Content of the file.

    Raises
    ------
    DataError
        If it is no list.
    """

    def __init__(self, path: Path, records: Any) -> None:
        if not isinstance(records, list):
            raise DataError(
                f"{path} must hold a list of records, found {type(records).__name__}; convert it."
            )
        self._path = path
        self._records: list[Any] = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]

    def fallback_id(self, index: int) -> str:
        """Position in the list, from 0."""
        return f"record {index}"

    def fingerprint(self) -> list[Any]:
        """Path, size and modification time of the file."""
        return _file_fingerprint(self._path)


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
                f"{self._path} must hold valid JSON in every line, found {error}; correct or delete it.",
                self.fallback_id(index),
            ) from error

    def fallback_id(self, index: int) -> str:
        """Line number, from 1, as an editor shows it."""
        return f"line {int(self._lines[index])}"

    def fingerprint(self) -> list[Any]:
        """Path, size and modification time of the file."""
        return _file_fingerprint(self._path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
