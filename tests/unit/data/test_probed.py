"""A data set together with its shapes."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import DataError
from dflop_ds.shapes import SampleShape, ShapeTable


def _table(num_rows: int) -> ShapeTable:
    return ShapeTable.from_shapes(SampleShape(f"s{i}", i, 0, 5, 5 + i, 2) for i in range(num_rows))


class _Letters:
    """Four samples, and a view of them without pixels."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return "abcd"[index]

    def without_media(self) -> list[str]:
        return list("ABCD")


def test_rows_are_the_positions_by_default() -> None:
    probed = ProbedDataset(_Letters(), _table(4))
    assert probed.rows.tolist() == [0, 1, 2, 3]
    assert probed.rows.dtype == np.int64


def test_samples_are_those_of_the_data_set_not_of_the_rows() -> None:
    probed = ProbedDataset(_Letters(), _table(2), [3, 1])
    assert len(probed) == 4, "dropped samples keep their index"
    assert [probed[int(row)] for row in probed.rows] == ["d", "b"]
    assert probed[0] == "a"


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [[0, 1]], []])
def test_another_number_of_rows_is_refused(rows) -> None:
    with pytest.raises(DataError, match=f"found {np.size(rows)} indices for 2 shapes"):
        ProbedDataset(_Letters(), _table(2), rows)


def test_without_media_keeps_shapes_and_rows() -> None:
    probed = ProbedDataset(_Letters(), _table(2), [3, 1])
    light = probed.without_media()
    assert [light[int(row)] for row in light.rows] == ["D", "B"]
    assert light.table is probed.table
    assert probed[3] == "d", "the original is unchanged"


def test_without_media_where_the_data_set_has_no_such_view() -> None:
    probed = ProbedDataset(["a", "b"], _table(2))
    assert probed.without_media() is probed
