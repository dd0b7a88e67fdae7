"""A data set together with the shapes of its usable samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from dflop_ds.errors import DataError
from dflop_ds.shapes import ShapeTable


class ProbedDataset(Dataset[Any]):
    """A map-style data set with one shape per usable sample.

    Parameters
    ----------
    dataset : Dataset
        ``dataset[i]`` is what the collator takes. ``without_media()``, if it has one, returns a
        view for ranks that need labels only.
    table : ShapeTable
    rows : ndarray of int64, shape (n,), optional
        Data set index of each row of ``table``; by default row ``i`` is sample ``i``.
    """

    def __init__(self, dataset: Any, table: ShapeTable, rows: npt.ArrayLike | None = None) -> None:
        self.dataset = dataset
        self.table = table
        self.rows = (
            np.arange(len(table), dtype=np.int64) if rows is None else np.asarray(rows, dtype=np.int64)
        )
        if self.rows.shape != (len(table),):
            raise DataError(
                f"there must be one data set index per shape, found {self.rows.size} indices for "
                f"{len(table)} shapes; probe the data again."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def without_media(self) -> ProbedDataset:
        """View that yields labels only, where the data set offers one."""
        light = getattr(self.dataset, "without_media", None)
        return self if light is None else ProbedDataset(light(), self.table, self.rows)
