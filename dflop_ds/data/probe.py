"""Shapes of a whole data set, and what to do with samples that cannot be trained on."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dflop_ds.data.dataset import LlavaDataset
from dflop_ds.data.probe_cache import MISSING_STAMP, load_shapes, sample_stamp, save_shapes
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.shapes import SampleShape, ShapeTable

logger = logging.getLogger(__name__)

Policy = Literal["error", "drop"]
Scan = Literal["headers", "decode"]

_BATCH_SAMPLES = 64
_MAX_NAMED_IN_ERROR = 10
_MAX_LOGGED_DROPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class DroppedSample:
    """A sample that is left out, and why.

    Attributes
    ----------
    index : int
        Position in the data set.
    sample_id : str
    reason : str
    """

    index: int
    sample_id: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What :func:`probe` found.

    Attributes
    ----------
    table : ShapeTable
        Shapes of the samples that are kept.
    rows : ndarray of int64, shape (len(table),)
        Their positions in the data set, increasing.
    dropped : tuple of DroppedSample
        The others, in data set order.
    """

    table: ShapeTable
    rows: npt.NDArray[np.int64]
    dropped: tuple[DroppedSample, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Outcome for one sample: a shape, or the reason why there is none."""

    sample_id: str
    shape: SampleShape | None
    reason: str
    stamp: int


class _Scanner(Dataset[Finding]):
    """Findings by data set position, for a data loader whose workers share the work."""

    def __init__(self, dataset: LlavaDataset, indices: Sequence[int], scan: Scan) -> None:
        self._dataset = dataset
        self._indices = indices
        self._scan = scan

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> Finding:
        return examine(self._dataset, self._indices[position], self._scan)


def examine(dataset: LlavaDataset, index: int, scan: Scan) -> Finding:
    """Look at one sample; whatever is wrong with it is a reason, not an error."""
    sample_id = dataset.sample_id(index)
    stamp = sample_stamp(dataset, index)
    try:
        shape = dataset.shape(index)
        if scan == "decode":
            dataset.check_media(index)
    except DataError as error:
        return Finding(sample_id, None, str(error), MISSING_STAMP)
    except ConfigError:
        raise
    except Exception as error:  # hostile content may fail anywhere; the sample must be named
        logger.debug("sample %s", sample_id, exc_info=True)
        found = DataError(
            f"it must be readable, found {type(error).__name__}: {error}; repair it.", sample_id
        )
        return Finding(sample_id, None, str(found), MISSING_STAMP)
    return Finding(sample_id, shape, "", stamp)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which samples are usable, and what happens to the others; see :func:`probe`.

    Attributes
    ----------
    max_tokens : int
    max_encoder_inputs : int or None
    broken, oversized : {"error", "drop"}
    scan : {"headers", "decode"}
    """

    max_tokens: int
    max_encoder_inputs: int | None = None
    broken: Policy = "error"
    oversized: Policy = "error"
    scan: Scan = "headers"

    def usable(self, dataset: LlavaDataset, index: int) -> SampleShape | None:
        """Shape of one sample; None, with a warning, where it is dropped.

        Raises
        ------
        DataError
            If it is not usable and the policy is "error".
        """
        finding = examine(dataset, index, self.scan)
        shape = finding.shape
        reason = finding.reason
        if shape is not None:
            reason = excess(shape, self.max_tokens, self.max_encoder_inputs)
        if not reason:
            return shape
        if (self.broken if shape is None else self.oversized) == "error":
            raise DataError(reason)
        logger.warning("dropped [%d] %s", index, reason)
        return None


def probe(
    dataset: LlavaDataset,
    *,
    max_tokens: int,
    max_encoder_inputs: int | None = None,
    broken: Policy = "error",
    oversized: Policy = "error",
    scan: Scan = "headers",
    processes: int = 1,
    cache: str | Path | None = None,
    progress: bool = True,
) -> ProbeResult:
    """Learn the shape of every sample.

    Parameters
    ----------
    dataset : LlavaDataset
    max_tokens : int
        LLM tokens that a sample may have at most.
    max_encoder_inputs : int, optional
        Encoder inputs (tiles, frames, audio positions) that a sample may have at most.
    broken : {"error", "drop"}
        What happens to samples with a malformed record or unusable media.
    oversized : {"error", "drop"}
        What happens to samples above a limit.
    scan : {"headers", "decode"}
        ``"decode"`` also decodes every media file once, and so finds damage behind a sound header.
    processes : int
        Processes that share the work; the result does not depend on it.
    cache : str or Path, optional
        NPZ file of an earlier scan; only samples whose record or media changed since are looked at again.
    progress : bool
        Show a progress bar when standard error is a terminal.

    Returns
    -------
    ProbeResult

    Raises
    ------
    DataError
        Once, after the whole scan: problems whose policy is ``"error"``, or nothing left to train on.
    """
    _check_options(broken, oversized, scan, max_tokens, max_encoder_inputs, processes)
    findings = _scan_all(dataset, scan, processes, None if cache is None else Path(cache), progress)
    kept: list[int] = []
    problems: dict[Policy, list[DroppedSample]] = {"error": [], "drop": []}
    for index, finding in enumerate(findings):
        shape = finding.shape
        reason = finding.reason if shape is None else excess(shape, max_tokens, max_encoder_inputs)
        if reason:
            policy = broken if shape is None else oversized
            problems[policy].append(DroppedSample(index, finding.sample_id, reason))
        else:
            kept.append(index)
    if problems["error"]:
        raise _summary(problems["error"], len(findings))
    _log_dropped(problems["drop"])
    return ProbeResult(_kept_table(findings, kept), np.array(kept, dtype=np.int64), tuple(problems["drop"]))


def _kept_table(findings: list[Finding], kept: list[int]) -> ShapeTable:
    if not kept:
        raise DataError(
            f"a data set must have at least one usable sample, found {len(findings)} and all of them "
            "dropped; raise the limits or repair the data."
        )
    table = ShapeTable.from_shapes(shape for index in kept if (shape := findings[index].shape) is not None)
    num_silent = int(np.count_nonzero(table.target_tokens == 0))
    if num_silent:
        logger.warning(
            "%d of %d samples have no supervised token; they add no gradient.", num_silent, len(table)
        )
    return table


def _check_options(
    broken: str, oversized: str, scan: str, max_tokens: int, max_encoder_inputs: int | None, processes: int
) -> None:
    for name, value, allowed in (
        ("broken", broken, ("error", "drop")),
        ("oversized", oversized, ("error", "drop")),
        ("scan", scan, ("headers", "decode")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name!r} must be one of {allowed}, found {value!r}; choose one of them.")
    limits = {"max_tokens": max_tokens, "max_encoder_inputs": max_encoder_inputs, "processes": processes}
    for name, number in limits.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name!r} must be at least 1, found {number}; raise it.")


def _scan_all(
    dataset: LlavaDataset, scan: Scan, processes: int, cache: Path | None, progress: bool
) -> list[Finding]:
    """Findings of every sample, in data set order, from the cache where it still holds."""
    fingerprint = f"{scan}:{dataset.fingerprint()}"
    known = load_shapes(cache, fingerprint, dataset) if cache is not None else {}
    pending = [index for index in range(len(dataset)) if index not in known]
    fresh = dict(zip(pending, _scan(dataset, pending, scan, processes, progress), strict=True))
    findings = [
        fresh[index]
        if index in fresh
        else Finding(known[index][0].sample_id, known[index][0], "", known[index][1])
        for index in range(len(dataset))
    ]
    if cache is not None and pending:
        save_shapes(cache, fingerprint, [(finding.shape, finding.stamp) for finding in findings])
    return findings


def _scan(
    dataset: LlavaDataset, indices: Sequence[int], scan: Scan, processes: int, progress: bool
) -> Iterable[Finding]:
    loader: DataLoader[Any] = DataLoader(
        _Scanner(dataset, indices, scan),
        batch_size=_BATCH_SAMPLES,
        num_workers=processes if processes > 1 else 0,
        collate_fn=list,
    )
    hidden = not (progress and sys.stderr.isatty())
    with tqdm(total=len(indices), desc="probing", unit="sample", disable=hidden) as bar:
        for batch in loader:
            bar.update(len(batch))
            yield from batch


def excess(shape: SampleShape, max_tokens: int, max_encoder_inputs: int | None) -> str:
    """Why a sample is too large, or an empty text."""
    reasons = []
    if shape.llm_tokens > max_tokens:
        reasons.append(f"at most {max_tokens} LLM tokens are allowed, found {shape.llm_tokens}")
    if max_encoder_inputs is not None and shape.encoder_inputs > max_encoder_inputs:
        reasons.append(
            f"at most {max_encoder_inputs} encoder inputs are allowed, found {shape.encoder_inputs}"
        )
    if not reasons:
        return ""
    found = "; ".join(reasons)
    return f'sample {shape.sample_id!r}: {found}; raise the limit, or drop it with "oversized": "drop".'


def _summary(problems: list[DroppedSample], num_samples: int) -> DataError:
    """One error for all problems; it carries the id of the first sample."""
    lines = [f"  [{problem.index}] {problem.reason}" for problem in problems[:_MAX_NAMED_IN_ERROR]]
    if len(problems) > _MAX_NAMED_IN_ERROR:
        lines.append(f"  ... and {len(problems) - _MAX_NAMED_IN_ERROR} more")
    error = DataError(
        f"all {num_samples} samples must be usable, found {len(problems)} that are not; repair them, or "
        "leave them "
        'out with "broken": "drop" and "oversized": "drop":\n' + "\n".join(lines)
    )
    error.sample_id = problems[0].sample_id
    return error


def _log_dropped(dropped: list[DroppedSample]) -> None:
    for sample in dropped[:_MAX_LOGGED_DROPS]:
        logger.warning("dropped [%d] %s", sample.index, sample.reason)
    if len(dropped) > _MAX_LOGGED_DROPS:
        logger.warning(
            "dropped %d samples in all, %d of them not listed", len(dropped), len(dropped) - _MAX_LOGGED_DROPS
        )
