"""Seconds that one rank spends on one microbatch of an unsplit model: four numbers, fitted while training.

Data-parallel training without a pipeline runs the encoder and then the LLM on the same rank, so a microbatch
costs ``overhead + a x tokens + b x sum of squared lengths + c x encoder inputs``. Padding counts: a padded
microbatch of n samples has n times the tokens of its longest one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflop_ds.cost.features import FloatArray
from dflop_ds.cost.files import check_schema, read_json, write_json
from dflop_ds.cost.prior import OVERHEAD, fit_non_negative
from dflop_ds.errors import CostModelError

SCHEMA_VERSION = 1
MIN_ROWS = 8

_TERMS = ("tokens", "squared_tokens", "encoder_inputs")
_MAX_ROUNDS = 10
_WEIGHT_FLOOR = 1e-2
_OUTLIER, _LEAST_OUTLIER = 4.0, 0.05


@dataclasses.dataclass(frozen=True)
class MicrobatchSizes:
    """Sizes of microbatches, arrays of one shape.

    Attributes
    ----------
    tokens : ndarray of float64
        LLM tokens that are computed, padding included.
    squared_tokens : ndarray of float64
        Sum over the rows (padded) or segments (packed) of length squared, in tokens^2.
    encoder_inputs : ndarray of float64
        Tiles plus frames.
    """

    tokens: FloatArray
    squared_tokens: FloatArray
    encoder_inputs: FloatArray

    @classmethod
    def from_bins(
        cls,
        llm_tokens: FloatArray,
        encoder_inputs: FloatArray,
        bins: Sequence[Sequence[int]],
        *,
        padded: bool,
    ) -> MicrobatchSizes:
        """Sizes of bins of samples, shape (len(bins),); an empty bin has size zero."""
        tokens, squares, inputs = np.zeros((3, len(bins)))
        for index, members in enumerate(bins):
            lengths = llm_tokens[list(members)]
            if padded and len(members):
                lengths = np.full(len(members), lengths.max())
            tokens[index], squares[index] = lengths.sum(), (lengths**2).sum()
            inputs[index] = encoder_inputs[list(members)].sum()
        return cls(tokens, squares, inputs)


@dataclasses.dataclass(frozen=True)
class MicrobatchCost:
    """Seconds of the forward and backward pass of one microbatch on one rank.

    Attributes
    ----------
    token_s : float
        Seconds per LLM token.
    squared_token_s : float
        Seconds per token^2 of attention.
    encoder_input_s : float
        Seconds per tile or frame.
    overhead_s : float
        Seconds per microbatch, whatever its size.

    Raises
    ------
    CostModelError
        If a coefficient is negative or not finite, or all that depend on the size are zero.
    """

    token_s: float
    squared_token_s: float
    encoder_input_s: float
    overhead_s: float

    def __post_init__(self) -> None:
        values = dataclasses.astuple(self)
        if not all(0 <= value < math.inf for value in values) or not any(values[:3]):
            raise CostModelError(
                "a microbatch cost must have finite, non-negative coefficients of which one depends on the "
                f"size, found {dataclasses.asdict(self)}. Measure again over more microbatches of different "
                "size."
            )

    def phases_s(self, sizes: MicrobatchSizes) -> FloatArray:
        """Seconds in the encoder and in the LLM, shape (\\*shape of the sizes, 2); overhead is the LLM's."""
        llm_s = self.token_s * sizes.tokens + self.squared_token_s * sizes.squared_tokens + self.overhead_s
        return np.stack([self.encoder_input_s * sizes.encoder_inputs, llm_s], axis=-1)

    def sample_s(self, llm_tokens: FloatArray, encoder_inputs: FloatArray) -> FloatArray:
        """Seconds that each sample adds to a packed microbatch, shape (n,)."""
        sizes = MicrobatchSizes(llm_tokens, llm_tokens**2, encoder_inputs)
        seconds: FloatArray = self.phases_s(sizes).sum(axis=-1) - self.overhead_s
        return seconds

    def scaled(self, *, llm: float, encoder: float) -> MicrobatchCost:
        """Costs times a factor: what a forward time has to be multiplied by to include its backward pass."""
        return MicrobatchCost(
            self.token_s * llm,
            self.squared_token_s * llm,
            self.encoder_input_s * encoder,
            self.overhead_s * llm,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MicrobatchCost:
        """Costs written by :meth:`to_dict`.

        Raises
        ------
        CostModelError
            If the content is of another schema, incomplete or not numeric.
        """
        check_schema(content, "microbatch cost", SCHEMA_VERSION)
        try:
            return cls(*(float(content[field.name]) for field in dataclasses.fields(cls)))
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(
                f"a microbatch cost must be complete, found {error!r}. Measure it again."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the costs as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> MicrobatchCost:
        """Read costs written by :meth:`save`; errors as in :meth:`from_dict`."""
        return cls.from_dict(read_json(path, "microbatch cost"))


def fit_microbatch_cost(
    sizes: MicrobatchSizes, measured_s: FloatArray, *, waits_for_slowest: bool
) -> MicrobatchCost:
    """Fit the costs to measured microbatches.

    Where ranks wait for each other inside a microbatch, all of them measure the time of the slowest one.
    Which one that is depends on the costs, so the fit and the choice of the slowest rank alternate.

    Parameters
    ----------
    sizes : MicrobatchSizes, shape (num_slots, num_ranks)
        Microbatches that ran at the same time share a row.
    measured_s : ndarray, shape (num_slots, num_ranks)
    waits_for_slowest : bool

    Raises
    ------
    CostModelError
        If there are fewer than 8 rows, a time is not positive, or no time grows with any size.
    """
    if measured_s.size == 0 or not (np.isfinite(measured_s) & (measured_s > 0)).all():
        raise CostModelError("measured microbatches must have positive, finite times. Measure again.")
    if not waits_for_slowest:
        return _fit(_flat(sizes), measured_s.ravel())
    slowest_s = measured_s.max(axis=1)
    rows = np.arange(len(slowest_s))
    chosen = sizes.tokens.argmax(axis=1)
    for _ in range(_MAX_ROUNDS):
        cost = _fit(_pick(sizes, (rows, chosen)), slowest_s)
        slowest = cost.phases_s(sizes).sum(axis=-1).argmax(axis=1)
        if (slowest == chosen).all():
            break
        chosen = slowest
    return cost


def _flat(sizes: MicrobatchSizes) -> MicrobatchSizes:
    return MicrobatchSizes(*(getattr(sizes, name).ravel() for name in _TERMS))


def _pick(sizes: MicrobatchSizes, index: Any) -> MicrobatchSizes:
    return MicrobatchSizes(*(getattr(sizes, name)[index] for name in _TERMS))


def _fit(sizes: MicrobatchSizes, measured_s: FloatArray) -> MicrobatchCost:
    if len(measured_s) < MIN_ROWS:
        raise CostModelError(
            f"costs must be fitted to {MIN_ROWS} or more microbatches, found {len(measured_s)}. Measure "
            "more steps."
        )
    cost = _least_squares(sizes, measured_s)
    # A page fault or another process can make single passes many times slower.
    errors = np.abs(cost.phases_s(sizes).sum(axis=-1) / measured_s - 1.0)
    usual = errors <= max(_OUTLIER * float(np.median(errors)), _LEAST_OUTLIER)
    if usual.all() or usual.sum() < MIN_ROWS:
        return cost
    return _least_squares(_pick(sizes, usual), measured_s[usual])


def _least_squares(sizes: MicrobatchSizes, measured_s: FloatArray) -> MicrobatchCost:
    terms = {OVERHEAD: np.ones(len(measured_s))} | {name: getattr(sizes, name) for name in _TERMS}
    weights = 1.0 / np.maximum(measured_s, _WEIGHT_FLOOR * float(np.median(measured_s)))
    found = fit_non_negative(terms, measured_s, weights)
    return MicrobatchCost(*(found.get(name, 0.0) for name in (*_TERMS, OVERHEAD)))
