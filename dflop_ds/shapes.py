"""Sizes of samples, known before any pixel is decoded.

A :class:`SampleShape` is what the cost model, the scheduler and the loss need to know of one
sample; a :class:`ShapeTable` holds the shapes of a data set column by column.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import DataError

SCHEMA_VERSION = 1

Column = npt.NDArray[Any]
"""One value per sample, int64 or float64."""

SHAPE_COLUMNS: dict[str, np.dtype[Any]] = {
    "num_tiles": np.dtype(np.int64),
    "num_frames": np.dtype(np.int64),
    "text_tokens": np.dtype(np.int64),
    "llm_tokens": np.dtype(np.int64),
    "target_tokens": np.dtype(np.int64),
    "audio_s": np.dtype(np.float64),
    "num_patches": np.dtype(np.int64),
    "sum_squared_windows": np.dtype(np.int64),
    "sum_squared_frames": np.dtype(np.int64),
    "audio_positions": np.dtype(np.int64),
}
"""Numeric fields of :class:`SampleShape`, in their order, with their types."""

_OPTIONAL_COLUMNS = (
    "audio_s",
    "num_patches",
    "sum_squared_windows",
    "sum_squared_frames",
    "audio_positions",
)
"""Columns that a table may lack; they are zero then."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleShape:
    """Shape of one training example.

    Attributes
    ----------
    sample_id : str
        Identifier from the data set.
    num_tiles : int
        Image crops fed to the encoder (base view included).
    num_frames : int
        Video frames fed to the encoder.
    text_tokens : int
        Tokens of the LLM sequence that are not media placeholders.
    llm_tokens : int
        Whole LLM sequence length, media tokens included.
    target_tokens : int
        Tokens that carry loss, after the shift by one.
    audio_s : float
        Length of its recordings, in seconds.
    num_patches : int
        Patches fed to an encoder of native resolution; 0 where the encoder takes fixed tiles.
    sum_squared_windows, sum_squared_frames : int
        Work of attention in an encoder whose inputs vary in size: sum over its windows of patches squared,
        or over its frames (recordings) of patches (positions) squared.
    audio_positions : int
        Positions of its recordings in the audio encoder.
    """

    sample_id: str
    num_tiles: int
    num_frames: int
    text_tokens: int
    llm_tokens: int
    target_tokens: int
    audio_s: float = 0.0
    num_patches: int = 0
    sum_squared_windows: int = 0
    sum_squared_frames: int = 0
    audio_positions: int = 0

    @property
    def encoder_inputs(self) -> int:
        """Encoder inputs: patches at native resolution, else tiles plus frames; and audio positions."""
        return (self.num_patches or self.num_tiles + self.num_frames) + self.audio_positions


class ShapeTable:
    """Columns of sample shapes, in data set order.

    Parameters
    ----------
    sample_ids : sequence of str, length n
    columns : dict of str to ndarray, shape (n,)
        One array per numeric field of :class:`SampleShape`; the last five may be left out where
        there is nothing of the kind.

    Raises
    ------
    DataError
        If a column is missing, of another length, negative or not finite.
    """

    def __init__(self, sample_ids: Sequence[str], columns: dict[str, Column]) -> None:
        self.sample_ids: list[str] = list(sample_ids)
        needed = [name for name in SHAPE_COLUMNS if name not in _OPTIONAL_COLUMNS]
        missing = [name for name in needed if name not in columns]
        if missing:
            raise DataError(
                f"a shape table needs the columns {needed}; {missing} are missing. Probe the data again."
            )
        self._columns: dict[str, Column] = {}
        for name, dtype in SHAPE_COLUMNS.items():
            column = np.asarray(columns.get(name, np.zeros(len(self.sample_ids))), dtype=dtype)
            if column.shape != (len(self.sample_ids),):
                raise DataError(
                    f"column {name!r} must have {len(self.sample_ids)} rows, found shape "
                    f"{column.shape}. Probe the data again."
                )
            bad = ~((column >= 0) & np.isfinite(column))
            if bad.any():
                row = int(bad.argmax())
                raise DataError(
                    f"column {name!r} must be finite and not negative, found {column[row]}. "
                    "Probe the data again.",
                    self.sample_ids[row],
                )
            self._columns[name] = column

    @classmethod
    def from_shapes(cls, shapes: Iterable[SampleShape]) -> ShapeTable:
        """Build a table from single shapes."""
        rows = list(shapes)
        columns = {
            name: np.array([getattr(row, name) for row in rows], dtype=dtype)
            for name, dtype in SHAPE_COLUMNS.items()
        }
        return cls([row.sample_id for row in rows], columns)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, row: int) -> SampleShape:
        return SampleShape(self.sample_ids[row], *(self._columns[name][row].item() for name in SHAPE_COLUMNS))

    @property
    def num_tiles(self) -> npt.NDArray[np.int64]:
        """Image crops per sample, shape (n,)."""
        return self._columns["num_tiles"]

    @property
    def num_frames(self) -> npt.NDArray[np.int64]:
        """Video frames per sample, shape (n,)."""
        return self._columns["num_frames"]

    @property
    def encoder_inputs(self) -> npt.NDArray[np.int64]:
        """Patches at native resolution, else tiles plus frames, and audio positions; shape (n,)."""
        seen = np.where(self.num_patches > 0, self.num_patches, self.num_tiles + self.num_frames)
        return seen + self.audio_positions

    @property
    def text_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that are not media placeholders, shape (n,)."""
        return self._columns["text_tokens"]

    @property
    def llm_tokens(self) -> npt.NDArray[np.int64]:
        """Whole sequence lengths, shape (n,)."""
        return self._columns["llm_tokens"]

    @property
    def target_tokens(self) -> npt.NDArray[np.int64]:
        """Supervised tokens per sample, shape (n,)."""
        return self._columns["target_tokens"]

    @property
    def audio_s(self) -> npt.NDArray[np.float64]:
        """Seconds of audio per sample, shape (n,)."""
        return self._columns["audio_s"]

    @property
    def num_patches(self) -> npt.NDArray[np.int64]:
        """Patches of native resolution per sample, shape (n,)."""
        return self._columns["num_patches"]

    @property
    def sum_squared_windows(self) -> npt.NDArray[np.int64]:
        """Sum over attention windows of patches squared, per sample, shape (n,)."""
        return self._columns["sum_squared_windows"]

    @property
    def sum_squared_frames(self) -> npt.NDArray[np.int64]:
        """Sum over frames or recordings of patches or positions squared, per sample, shape (n,)."""
        return self._columns["sum_squared_frames"]

    @property
    def audio_positions(self) -> npt.NDArray[np.int64]:
        """Positions in the audio encoder per sample, shape (n,)."""
        return self._columns["audio_positions"]

    def take(self, rows: npt.ArrayLike) -> ShapeTable:
        """Table of the given rows (indices, not a mask), in the given order."""
        index = np.asarray(rows)
        if index.dtype == np.bool_:
            raise DataError("rows must be indices, found a mask; pass np.flatnonzero(mask).")
        index = index.astype(np.int64)
        ids = [self.sample_ids[i] for i in index]
        return ShapeTable(ids, {name: column[index] for name, column in self._columns.items()})

    def save(self, path: str | Path) -> None:
        """Write the table as NPZ (no pickle)."""
        with open(path, "wb") as file:
            self.write(file)

    def write(self, file: BinaryIO) -> None:
        """Write the table as NPZ into an open binary file."""
        np.savez_compressed(
            file,
            schema_version=np.int64(SCHEMA_VERSION),
            sample_ids=np.array(self.sample_ids, dtype=np.str_),
            **self._columns,  # type: ignore[arg-type]
        )

    @classmethod
    def load(cls, path: str | Path) -> ShapeTable:
        """Read a table written by :meth:`save`.

        Raises
        ------
        DataError
            If the file is missing, damaged or of another schema.
        """
        try:
            with open(path, "rb") as file:
                return cls.read(file, str(path))
        except OSError as error:
            raise DataError(
                f"{path} must be a readable shape table (NPZ); {error}. Probe the data again."
            ) from error

    @classmethod
    def read(cls, file: BinaryIO, name: str = "the shape table") -> ShapeTable:
        """Read a table from an open binary file.

        Raises
        ------
        DataError
            If the content is damaged or of another schema.
        """
        try:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            arrays = {key: archive[key] for key in archive.files}
        except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{name} must be a readable NPZ; {error}. Probe the data again.") from error
        version = int(arrays.pop("schema_version", np.int64(0)))
        if version != SCHEMA_VERSION:
            raise DataError(
                f"{name} must have schema_version {SCHEMA_VERSION}, found {version}. Probe the data again."
            )
        ids = [str(value) for value in arrays.pop("sample_ids", np.array([], dtype=np.str_))]
        return cls(ids, arrays)
