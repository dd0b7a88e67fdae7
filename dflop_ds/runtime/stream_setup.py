"""Streams: opening one, the samples of its first window, and its planner."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop_ds.config import BatchSizes, DflopConfig
from dflop_ds.data.hub_records import MemoryRecords, load_hub_set
from dflop_ds.data.stream import ShapeReader, StreamDataset, StreamRecords
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.runtime import distributed
from dflop_ds.runtime.data_setup import open_dataset, sample_limits
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.scheduling.windows import StreamPlanner
from dflop_ds.shapes import SampleShape, ShapeTable


def is_stream(config: DflopConfig, source: Any) -> bool:
    """Whether training data are to be read as a stream."""
    return config.data.streaming if source is None else not hasattr(source, "__getitem__")


def open_stream(config: DflopConfig, model_config: Any, source: Any, batch_size: int) -> StreamDataset:
    """Open a stream on every rank; rank 0 finds the usable samples of its first window.

    Parameters
    ----------
    config : DflopConfig
    model_config : PreTrainedConfig
    source : iterable or None
        None: ``dflop.data.train_path``.
    batch_size : int
        Samples of a global batch.
    """
    distributed.together(lambda: _check(config))
    records = distributed.together(lambda: StreamRecords(_stream(config) if source is None else source))
    settings = distributed.together(lambda: open_dataset(config, []))
    shapes = ShapeReader(records, settings, sample_limits(config, model_config))
    start = records.state()

    def first_window() -> bytes:
        found: dict[int, SampleShape] = {}
        while len(found) < config.data.stream_window * batch_size:
            sample = shapes.next_shape(0)
            if sample is None:
                break
            if sample[1] is not None:
                found[sample[0]] = sample[1]
        if not found:
            raise DataError("a stream must hold usable samples, found none in its first pass; check it.")
        buffer = io.BytesIO()
        np.save(buffer, np.array(list(found), dtype=np.int64), allow_pickle=False)
        ShapeTable.from_shapes(found.values()).write(buffer)
        return buffer.getvalue()

    buffer = io.BytesIO(distributed.on_first_rank(first_window))
    numbers = np.load(buffer, allow_pickle=False)
    table = ShapeTable.read(io.BytesIO(buffer.read()))
    head = distributed.together(lambda: [records.record(int(number)) for number in numbers])
    distributed.together(lambda: records.restore(start))
    return StreamDataset(settings.with_records(MemoryRecords(head)), table, records, shapes)


def stream_planner(
    config: DflopConfig,
    sizes: BatchSizes,
    dataset: StreamDataset,
    make: Callable[[ShapeTable, npt.NDArray[np.int64]], StepPlanner],
    num_replicas: int,
) -> StreamPlanner:
    """Planner of a run over a stream.

    Raises
    ------
    ConfigError
        If predicted times are to be corrected, which needs the shapes of all samples.
    """
    if config.cost.adaptive:
        raise ConfigError(
            "dflop.cost.adaptive must be false with a stream, whose shapes are not known beforehand; found "
            "true. Turn it off."
        )
    order = EpochOrder(
        num_samples=config.data.stream_window * sizes.train_batch_size,
        batch_size=sizes.train_batch_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
        tail=config.data.tail,
    )
    kept = 2 * config.scheduler.lookahead + 4
    return StreamPlanner(dataset.shapes, order, make, num_replicas, sizes.num_microbatches, kept)


def _check(config: DflopConfig) -> None:
    if not config.enabled:
        raise ConfigError(
            "dflop.enabled must be true with a stream, which DeepSpeed's own loader cannot draw from; found "
            "false. Use a data set with a length."
        )
    if config.train.num_steps is None and config.train.num_epochs is not None:
        raise ConfigError(
            "dflop.train.num_steps must be given with a stream, whose length is not known; found "
            "num_epochs. Replace it."
        )


def _stream(config: DflopConfig) -> Any:
    return load_hub_set(Path(config.data.train_path or "")).to_iterable_dataset()
