"""The data set of a configuration, with its shapes and its collator."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from dflop_ds.config import DflopConfig
from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.hub_records import as_records
from dflop_ds.data.probe import Limits, ProbeResult, probe
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.families import import_families
from dflop_ds.runtime import distributed
from dflop_ds.shapes import ShapeTable


def open_dataset(config: DflopConfig, source: Any = None) -> LlavaDataset:
    """The data set of `source`, by default of ``dflop.data.train_path``; media are not read yet.

    Parameters
    ----------
    config : DflopConfig
    source : str, datasets.Dataset or list of records, optional
    """
    import_families(config.model.family_module)
    source = config.data.train_path or "" if source is None else source
    named = isinstance(source, str)
    return from_pretrained_dir(
        config.model.path or "",
        source if named else as_records(source),
        media_root=config.data.media_root or (Path(source).parent if named else "."),
        max_frames=config.data.max_frames,
        frames_per_second=config.data.frames_per_second,
        long_audio=config.data.long_audio,
        seed=config.seed,
    )


def open_probed(
    config: DflopConfig, model_config: Any, source: Any, shape_cache: str | None
) -> ProbedDataset:
    """Open a data set on every rank; its shapes are read by rank 0 and sent to all."""
    dataset = distributed.together(lambda: open_dataset(config, source))

    def scan() -> bytes:
        found = scan_shapes(dataset, config, model_config, shape_cache)
        buffer = io.BytesIO()
        np.save(buffer, found.rows, allow_pickle=False)
        found.table.write(buffer)
        return buffer.getvalue()

    buffer = io.BytesIO(distributed.on_first_rank(scan))
    rows = np.load(buffer, allow_pickle=False)
    return ProbedDataset(dataset, ShapeTable.read(io.BytesIO(buffer.read())), rows)


def scan_shapes(
    dataset: LlavaDataset, config: DflopConfig, model_config: Any, shape_cache: str | None
) -> ProbeResult:
    """Shapes of a data set within the limits of the configuration and of the model's positions."""
    limits = sample_limits(config, model_config)
    return probe(
        dataset,
        max_tokens=limits.max_tokens,
        max_encoder_inputs=limits.max_encoder_inputs,
        broken=limits.broken,
        oversized=limits.oversized,
        scan=limits.scan,
        processes=config.data.scan_processes,
        cache=shape_cache,
    )


def sample_limits(config: DflopConfig, model_config: Any) -> Limits:
    """Which samples are usable, by the configuration and by the model's positions."""
    limits = (config.data.max_tokens, _number(config.scheduler.max_tokens_per_microbatch))
    longest = int(model_config.get_text_config().max_position_embeddings)
    return Limits(
        max_tokens=min([longest, *(limit for limit in limits if limit is not None)]),
        max_encoder_inputs=_number(config.scheduler.max_encoder_inputs_per_microbatch),
        broken=config.data.broken,
        oversized=config.data.oversized,
        scan=config.data.scan,
    )


def make_collator(dataset: LlavaDataset, config: DflopConfig) -> PackedCollator:
    """Collator of packed microbatches; with dflop disabled, of DeepSpeed's per-microbatch mean."""
    pad = dataset.tokenizer.pad_token_id
    return PackedCollator(
        dataset.tokenizer.eos_token_id if pad is None else pad,
        row_shape=dataset.processor.row_shape,
        reduction=config.loss.reduction,
        normalise="none" if config.enabled else "microbatch",
    )


def _number(limit: Any) -> int | None:
    return limit if isinstance(limit, int) else None
