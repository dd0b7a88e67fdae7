"""Records of Hugging Face ``datasets``, and records that are in memory already."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflop_ds.errors import ConfigError, DataError


class HubRecords:
    """Records of a map-style ``datasets.Dataset`` with the columns of LLaVA's format.

    Media columns are read as the encoded files that they hold, so that shapes come from headers.

    Parameters
    ----------
    dataset : datasets.Dataset
    """

    def __init__(self, dataset: Any) -> None:
        check_columns(dataset)
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index].to_pylist()[0]

    def fallback_id(self, index: int) -> str:
        """Row number, from 0."""
        return f"row {index}"

    def fingerprint(self) -> list[Any]:
        """What ``datasets`` itself tells its caches apart by."""
        return [self._dataset._fingerprint]


def load_hub_set(path: Path) -> Any:
    """The data set in a folder written by ``save_to_disk``, or in a Parquet file.

    Raises
    ------
    DataError
        If it cannot be read.
    """
    datasets = require_datasets()
    if not path.is_dir() and path.suffix != ".parquet":
        raise DataError(
            f"a data set of datasets must be a folder that it has saved, or a .parquet file, found {path}; "
            "save it so, or set dflop.data.streaming to false."
        )
    try:
        if path.is_dir():
            return datasets.load_from_disk(str(path))
        return datasets.Dataset.from_parquet(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path} must be a data set that datasets can read, found {error}; save it again."
        ) from error


class MemoryRecords:
    """Records in a list; media may be images or arrays.

    Parameters
    ----------
    records : sequence of dict
    """

    def __init__(self, records: Sequence[Any]) -> None:
        self._records = records
        self._fingerprint = secrets.token_hex(16)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]

    def fallback_id(self, index: int) -> str:
        """Position in the list, from 0."""
        return f"record {index}"

    def fingerprint(self) -> list[Any]:
        """Never the same twice: nobody knows what the list holds next time."""
        return [self._fingerprint]


def as_records(source: Any) -> Any:
    """Records of a ``datasets.Dataset`` or a list.

    Raises
    ------
    ConfigError
        If the source is neither.
    """
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        return MemoryRecords(source)
    if hasattr(source, "column_names") and hasattr(source, "__len__"):
        return HubRecords(source)
    raise ConfigError(
        f"training data must be a datasets.Dataset or a list of records, found {type(source).__name__}; "
        "convert it, or name a file in dflop.data.train_path."
    )


def check_columns(dataset: Any) -> None:
    """Refuse a data set without conversations.

    Raises
    ------
    DataError
    """
    names = dataset.column_names
    if isinstance(names, dict):
        raise DataError(
            f"training data must be one data set, found the splits {sorted(names)}; pass or save one of them."
        )
    if names is not None and "conversations" not in names:
        raise DataError(
            f'a data set must have a column "conversations" as in LLaVA\'s format, found {names}; map it.'
        )


def require_datasets() -> Any:
    """The ``datasets`` package.

    Raises
    ------
    ConfigError
        If it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"this kind of training data needs the package datasets, found {error}; "
            "pip install 'dflop_ds[datasets]'."
        ) from error
    return datasets
