"""Shape tables: round trips, damage, what is refused."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from dflop_ds.errors import DataError
from dflop_ds.shapes import SampleShape, ShapeTable

COLUMNS = ("num_tiles", "num_frames", "text_tokens", "llm_tokens", "target_tokens")
SHAPES = [
    SampleShape("a/1.json#0", 5, 0, 30, 3030, 12),
    SampleShape("Ω sample", 0, 32, 8, 6281, 0),
    SampleShape("c", 0, 0, 4, 4, 3, audio_s=29.75, audio_positions=1488),
]
NATIVE = SampleShape("d", 2, 4, 9, 60, 5, num_patches=204, sum_squared_windows=9000, sum_squared_frames=20000)


def _columns(num_rows: int = 2) -> dict[str, np.ndarray]:
    return {name: np.arange(num_rows, dtype=np.int64) for name in COLUMNS}


def _rows(table: ShapeTable) -> list[SampleShape]:
    return [table[row] for row in range(len(table))]


def test_rows_and_columns() -> None:
    table = ShapeTable.from_shapes(iter(SHAPES))
    assert len(table) == 3
    assert _rows(table) == SHAPES
    assert table.sample_ids == ["a/1.json#0", "Ω sample", "c"]
    assert table.num_tiles.tolist() == [5, 0, 0]
    assert table.num_frames.tolist() == [0, 32, 0]
    assert table.encoder_inputs.tolist() == [5, 32, 1488]
    assert table.text_tokens.tolist() == [30, 8, 4]
    assert table.llm_tokens.tolist() == [3030, 6281, 4]
    assert table.target_tokens.tolist() == [12, 0, 3]
    assert SHAPES[0].encoder_inputs == 5
    assert all(isinstance(value, int) for value in (table[0].num_tiles, table[1].llm_tokens))


@pytest.mark.parametrize("shapes", [SHAPES, []], ids=["three", "none"])
def test_round_trip_through_a_file(shapes: list[SampleShape], tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    ShapeTable.from_shapes(shapes).save(path)
    assert path.is_file(), "no suffix is added"
    assert _rows(ShapeTable.load(path)) == shapes
    assert _rows(ShapeTable.load(str(path))) == shapes


def test_patches_are_the_encoder_inputs_of_native_resolution(tmp_path: Path) -> None:
    table = ShapeTable.from_shapes([*SHAPES, NATIVE])
    assert table.encoder_inputs.tolist() == [5, 32, 1488, 204]
    assert NATIVE.encoder_inputs == 204
    table.save(tmp_path / "shapes.npz")
    assert ShapeTable.load(tmp_path / "shapes.npz")[3] == NATIVE


def test_round_trip_through_a_stream() -> None:
    buffer = io.BytesIO()
    ShapeTable.from_shapes(SHAPES).write(buffer)
    assert _rows(ShapeTable.read(io.BytesIO(buffer.getvalue()))) == SHAPES


def test_take_repeats_and_reorders() -> None:
    table = ShapeTable.from_shapes(SHAPES)
    assert _rows(table.take([2, 0, 2])) == [SHAPES[2], SHAPES[0], SHAPES[2]]
    assert _rows(table.take(np.array([1]))) == [SHAPES[1]]
    assert len(table.take([])) == 0
    with pytest.raises(IndexError):
        table.take([3])


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_is_named(name: str) -> None:
    columns = _columns()
    del columns[name]
    with pytest.raises(DataError, match=rf"\['{name}'\] are missing"):
        ShapeTable(["a", "b"], columns)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_negative_value_is_named_with_its_sample(name: str) -> None:
    columns = _columns()
    columns[name] = np.array([3, -4])
    with pytest.raises(
        DataError, match=f"sample 'b': column '{name}' must be finite and not negative, found -4"
    ) as caught:
        ShapeTable(["a", "b"], columns)
    assert caught.value.sample_id == "b"


@pytest.mark.parametrize("seconds", [-1.0, np.nan, np.inf])
def test_seconds_that_are_no_duration_are_named(seconds: float) -> None:
    columns = _columns() | {"audio_s": np.array([0.5, seconds])}
    with pytest.raises(DataError, match="sample 'b': column 'audio_s' must be finite and not negative"):
        ShapeTable(["a", "b"], columns)


def test_a_table_without_audio_has_no_seconds() -> None:
    assert ShapeTable(["a", "b"], _columns()).audio_s.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("column", [np.zeros(3, dtype=np.int64), np.zeros((2, 1), dtype=np.int64)])
def test_another_length_is_refused(column: np.ndarray) -> None:
    with pytest.raises(DataError, match="'llm_tokens' must have 2 rows"):
        ShapeTable(["a", "b"], {**_columns(), "llm_tokens": column})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.npz must be a readable shape table"):
        ShapeTable.load(tmp_path / "absent.npz")
    with pytest.raises(DataError, match="must be a readable"):
        ShapeTable.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 half a zip"])
def test_another_kind_of_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"shapes\.npz must be a readable NPZ"):
        ShapeTable.load(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    ShapeTable.from_shapes(SHAPES).save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            ShapeTable.load(path)


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    """Damage is an error of ours, or has no effect."""
    path = tmp_path / "shapes.npz"
    ShapeTable.from_shapes(SHAPES).save(path)
    whole = path.read_bytes()
    other = []
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        try:
            ShapeTable.load(path)
        except DataError:
            pass
        except Exception as error:
            other.append(f"{position}: {type(error).__name__}")
    assert other == []


def test_a_bare_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(DataError):
        ShapeTable.load(path)


@pytest.mark.parametrize(("version", "found"), [(np.int64(2), 2), (None, 0)])
def test_another_schema_is_refused(version: np.int64 | None, found: int, tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    extra = {} if version is None else {"schema_version": version}
    np.savez(path, sample_ids=np.array(["a", "b"]), **_columns(), **extra)
    with pytest.raises(DataError, match=f"must have schema_version 1, found {found}"):
        ShapeTable.load(path)


def test_pickled_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    content = _columns() | {"llm_tokens": np.array([{"a": 1}, None], dtype=object)}
    np.savez(path, schema_version=np.int64(1), sample_ids=np.array(["a", "b"]), **content)
    with pytest.raises(DataError, match="must be a readable NPZ"):
        ShapeTable.load(path)
