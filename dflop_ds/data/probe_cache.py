"""Shapes of an earlier scan, kept as NPZ next to checksums of what they depend on."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflop_ds.data.dataset import LlavaDataset
from dflop_ds.errors import DataError
from dflop_ds.shapes import SHAPE_COLUMNS, SampleShape

logger = logging.getLogger(__name__)

MISSING_STAMP = 0
"""Stamp of a sample that must be looked at again."""

_SCHEMA_VERSION = 4


def sample_stamp(dataset: LlavaDataset, index: int) -> int:
    """Checksum of a record and of path, size and modification time of its media; 0 if one cannot be read."""
    parts: list[tuple[str, int, int]] = []
    try:
        for path in dataset.media_paths(index):
            stat = path.stat()
            parts.append((str(path), stat.st_size, stat.st_mtime_ns))
        digest = hashlib.sha256(repr((dataset.record_key(index), parts)).encode()).digest()
    except (DataError, OSError):
        return MISSING_STAMP
    return int.from_bytes(digest[:8], "big", signed=True)


def save_shapes(path: Path, fingerprint: str, entries: Sequence[tuple[SampleShape | None, int]]) -> None:
    """Write the shapes that were found, with the stamps of their samples.

    Parameters
    ----------
    path : Path
        Replaced as a whole, so that another process never reads half a file.
    fingerprint : str
        Of the settings.
    entries : sequence of (SampleShape or None, int)
        For every sample in data set order.
    """
    found = [(shape, stamp) for shape, stamp in entries if shape is not None and stamp != MISSING_STAMP]
    columns = {
        name: np.array([getattr(shape, name) for shape, _ in found], dtype=dtype)
        for name, dtype in SHAPE_COLUMNS.items()
    }
    arrays = {
        "schema_version": np.int64(_SCHEMA_VERSION),
        "fingerprint": np.str_(fingerprint),
        "stamps": np.array([stamp for _, stamp in found], dtype=np.int64),
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            np.savez_compressed(file, **arrays, **columns)  # type: ignore[arg-type]
        os.replace(partial, path)
    except OSError as error:
        logger.warning("the shape cache %s must be writable, found %s; nothing is kept.", path, error)


def load_shapes(path: Path, fingerprint: str, dataset: LlavaDataset) -> dict[int, tuple[SampleShape, int]]:
    """Shapes and stamps by data set position, of samples whose record and media are as they were.

    Samples may have been added, removed or moved since. A missing, damaged or outdated file gives none:
    the cache only saves time.
    """
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        current = (int(arrays["schema_version"]), str(arrays["fingerprint"])) == (
            _SCHEMA_VERSION,
            fingerprint,
        )
        rows = zip(*(arrays[name].tolist() for name in SHAPE_COLUMNS), strict=True)
        kept = dict(zip(arrays["stamps"].tolist(), rows, strict=True))
        if any(float(arrays[name].min(initial=0)) < 0 for name in SHAPE_COLUMNS):
            raise ValueError("a negative size")
    except (
        AttributeError,
        EOFError,
        KeyError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        logger.warning(
            "the shape cache %s must be readable, found %s; the data set is scanned again.", path, error
        )
        return {}
    if not current:
        logger.info("the shape cache %s is of other settings; the data set is scanned again.", path)
        return {}
    stamps = {index: sample_stamp(dataset, index) for index in range(len(dataset))}
    return {
        index: (SampleShape(dataset.sample_id(index), *kept[stamp]), stamp)
        for index, stamp in stamps.items()
        if stamp in kept
    }
