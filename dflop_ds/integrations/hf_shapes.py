"""Sizes of the samples of a Trainer's data set."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from dflop_ds.errors import DataError
from dflop_ds.integrations.hf_config import TrainerCallbackConfig
from dflop_ds.integrations.hf_media import MEDIA
from dflop_ds.shapes import SHAPE_COLUMNS, SampleShape, ShapeTable

logger = logging.getLogger(__name__)

ShapeFn = Callable[[Any], "SampleShape | Mapping[str, float] | int"]
Collate = Callable[[list[Any]], Any]


def trainer_shapes(
    trainer: Trainer, collate: Collate, config: TrainerCallbackConfig, shape_fn: ShapeFn | None
) -> ShapeTable:
    """Shapes of all training samples, from the first source that there is.

    In this order: `shape_fn`, the file `config.shapes`, the length column, the samples themselves. The data
    set is the one given to the Trainer: columns that the Trainer removes for the model are still there.

    Raises
    ------
    DataError
        If a sample has no usable shape, or the file is of another data set; on every rank.
    """
    table = _table(trainer, collate, config, shape_fn)
    if len(table) > 1 and not np.ptp(table.llm_tokens) and not np.ptp(table.encoder_inputs):
        logger.warning(
            "all %d samples have the same shape (%d tokens, %d encoder inputs): there is nothing to balance. "
            "Check the shape source.",
            len(table),
            table.llm_tokens[0],
            table.encoder_inputs[0],
        )
    return table


def _table(
    trainer: Trainer, collate: Collate, config: TrainerCallbackConfig, shape_fn: ShapeFn | None
) -> ShapeTable:
    dataset = trainer.train_dataset
    if shape_fn is not None:
        return _measure(trainer, lambda sample: as_shape(shape_fn(sample)))
    if config.shapes is not None:
        table = ShapeTable.load(config.shapes)
        if len(table) != len(dataset):
            raise DataError(
                f"{config.shapes} must have one row per training sample ({len(dataset)}), found "
                f"{len(table)}. Probe this data set."
            )
        return table
    name = config.length_column or trainer.args.length_column_name
    columns = getattr(dataset, "column_names", None) or ()
    if name in columns:
        return _from_lengths(_whole_lengths(dataset[name][:], name, len(dataset)))
    if config.length_column is not None:
        raise DataError(
            f"the training data must have the column {name!r}, found {list(columns)}. Correct length_column."
        )
    logger.warning(
        "no shapes are given: all %d samples are loaded once to read their sizes. Give shape_fn, shapes or a "
        "%r column to avoid that.",
        len(dataset),
        name,
    )
    return _measure(trainer, lambda sample: measured_shape(sample, collate))


def as_shape(value: SampleShape | Mapping[str, float] | int) -> SampleShape:
    """What a `shape_fn` returned: a shape, a mapping with some of its fields, or the number of LLM tokens.

    Raises
    ------
    DataError
        If it is something else, a field is unknown or a size negative.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        value = {"llm_tokens": int(value)}
    if isinstance(value, Mapping) and "llm_tokens" in value and set(value) <= {*SHAPE_COLUMNS}:
        tokens = value["llm_tokens"]
        fields = dict.fromkeys(SHAPE_COLUMNS, 0) | {"text_tokens": tokens, "target_tokens": tokens, **value}
        value = SampleShape(
            "", **{name: kind.type(fields[name]).item() for name, kind in SHAPE_COLUMNS.items()}
        )
    if not isinstance(value, SampleShape):
        raise DataError(
            f"shape_fn must return a SampleShape, a mapping of {[*SHAPE_COLUMNS]} with llm_tokens, or a "
            f"number of tokens, found {value!r}. Correct shape_fn."
        )
    if not all(getattr(value, name) >= 0 for name in SHAPE_COLUMNS):
        raise DataError(f"sizes of a sample must not be negative, found {value!r}. Correct shape_fn.")
    return value


def measured_shape(sample: Any, collate: Collate) -> SampleShape:
    """Shape of a sample as it reaches the model: processed already, or processed by the collator.

    Raises
    ------
    DataError
        If neither the sample nor its batch has ``input_ids``.
    """
    known = isinstance(sample, Mapping) and "input_ids" in sample
    fields: Mapping[str, Any] = sample if known else collate([sample])
    if "input_ids" not in fields:
        raise DataError(
            f"a sample must have input_ids to be measured, found {sorted(fields)}. Give shape_fn."
        )
    tokens = int(np.asarray(fields["input_ids"]).size)
    inputs = {kind.is_video: 0 for kind in MEDIA}
    for kind in MEDIA:
        pixels = fields.get(kind.key)
        if pixels is not None:
            inputs[kind.is_video] += _encoder_inputs(pixels)
    return SampleShape("", inputs[False], inputs[True], tokens, tokens, tokens)


def _encoder_inputs(pixels: Any) -> int:
    """Encoder batch entries: all leading dimensions before channels, height and width (or features)."""
    if isinstance(pixels, (list, tuple)):
        return sum(_encoder_inputs(item) for item in pixels)
    shape = np.shape(pixels)
    return int(np.prod(shape[:-3])) if len(shape) > 3 else int(shape[0]) if len(shape) == 2 else 1


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the random state as it was: trying a collator may draw from it (Python, NumPy, PyTorch CPU)."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def _whole_lengths(column: Any, name: str, num_samples: int) -> np.ndarray:
    """A column of lengths as whole numbers.

    Raises
    ------
    DataError
        If it is not one whole number per sample, at least 0.
    """
    try:
        lengths = np.asarray(column, dtype=np.float64)
        is_fine = lengths.shape == (num_samples,) and bool(((lengths >= 0) & (lengths % 1 == 0)).all())
    except (TypeError, ValueError):
        is_fine = False
    if not is_fine:
        raise DataError(
            f"column {name!r} must hold the tokens of each sample as a whole number of at least 0, found "
            f"{np.asarray(column, dtype=object)[:3].tolist()} ... Correct it, name another length_column, or "
            "give shape_fn."
        )
    return lengths.astype(np.int64)


def _from_lengths(lengths: np.ndarray) -> ShapeTable:
    zeros = np.zeros_like(lengths)
    columns = {"num_tiles": zeros, "num_frames": zeros}
    columns |= dict.fromkeys(("text_tokens", "llm_tokens", "target_tokens"), lengths)
    return ShapeTable([str(row) for row in range(len(lengths))], columns)


def _measure(trainer: Trainer, measure: Callable[[Any], SampleShape]) -> ShapeTable:
    """Measure every sample once, divided among the ranks."""
    dataset, accelerator = trainer.train_dataset, trainer.accelerator
    num_ranks, rank = accelerator.num_processes, accelerator.process_index
    rows = np.full((-(-len(dataset) // num_ranks), len(SHAPE_COLUMNS)), np.nan)
    problem: Exception | None = None
    with preserved_rng():
        for place, index in enumerate(range(rank, len(dataset), num_ranks)):
            try:
                shape = measure(dataset[index])
                rows[place] = [getattr(shape, name) for name in SHAPE_COLUMNS]
            except Exception as error:
                problem = error
                break
    gathered = accelerator.gather(torch.from_numpy(rows).to(trainer.args.device)).cpu().numpy()
    by_sample = gathered.reshape(num_ranks, len(rows), -1).transpose(1, 0, 2).reshape(-1, rows.shape[1])
    by_sample = by_sample[: len(dataset)]
    failed = np.flatnonzero(np.isnan(by_sample).any(axis=1))
    if failed.size:
        index = int(failed[0])
        raise DataError(
            f"every sample must have a shape, found none for training sample {index} (and perhaps others)"
            f"{f': {type(problem).__name__}: {problem}'.rstrip('.') if problem else ''}. Correct the sample "
            "or shape_fn."
        ) from problem
    columns = {name: by_sample[:, column] for column, name in enumerate(SHAPE_COLUMNS)}
    return ShapeTable([str(row) for row in range(len(by_sample))], columns)
