"""The analytic part of the cost model: seconds as a non-negative sum of sourced terms.

Time of a layer = launch overhead + FLOPs / speed + bytes / bandwidth, with one coefficient per term,
fitted per layer kind and direction. The sum is non-negative, non-decreasing in every size, and linear
outside the sizes that were profiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

import numpy as np

from dflop_ds import flops
from dflop_ds.cost.features import FloatArray, MicrobatchFeatures, check_kind
from dflop_ds.errors import CostModelError

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Name = TypeVar("Name")

OVERHEAD = "overhead"
_WEIGHT_FLOOR = 1e-2
_RANK_TOLERANCE = 1e-6

_ATTENTION_SUMS: dict[str, str | None] = {
    "vision_block": None,
    "vision_window_block": "sum_squared_windows",
    "vision_frame_block": "sum_squared_frames",
}
"""Kinds of encoder blocks, with the feature that their attention grows with where tiles are not fixed."""


def prior_terms(
    kind: str, direction: Direction, features: MicrobatchFeatures, dims: flops.ModelDims
) -> dict[str, FloatArray]:
    """Terms of a layer kind that grow with the microbatch, without the constant launch overhead.

    Terms that are proportional to one another for every possible microbatch share one entry: the
    attention and the projections of an encoder block both grow with the tiles, and the bytes of a
    matrix product grow with its FLOPs. ``segments`` is the launch of one attention call per segment.

    Parameters
    ----------
    kind : str
        One of :data:`~dflop_ds.cost.features.LAYER_KINDS`.
    direction : {"forward", "backward"}
        Backward doubles FLOPs and bytes (:data:`dflop_ds.flops.BACKWARD_RATIO`).
    features : MicrobatchFeatures, n microbatches
    dims : ModelDims

    Returns
    -------
    dict of str to ndarray, shape (n,)
        In FLOPs, bytes and segments.
    """
    check_kind(kind)
    llm, vision = dims.llm, dims.vision
    terms: dict[str, FloatArray] = {}
    if kind == "vision_embed":
        terms["flops"] = flops.vision_embed_flops(vision, features.encoder_inputs)
    elif kind in _ATTENTION_SUMS:
        terms |= _encoder_block_terms(kind, features, dims)
    elif kind == "projector":
        terms["flops"] = flops.projector_flops(dims, features.encoder_inputs)
        terms["bytes"] = flops.copy_bytes(features.media_tokens, llm.hidden)
    elif kind == "decoder_block":
        terms["flops"] = flops.decoder_linear_flops(llm, features.llm_tokens)
        terms["attention_flops"] = flops.decoder_attention_flops(llm, features.sum_squared_tokens)
    elif kind == "head":
        terms["flops"] = flops.head_flops(llm, features.target_tokens)
        terms["bytes"] = flops.copy_bytes(features.llm_tokens, llm.hidden)
    else:
        terms["bytes"] = flops.copy_bytes(features.llm_tokens, llm.hidden)
    if direction == "backward":
        terms = {name: flops.BACKWARD_RATIO * term for name, term in terms.items()}
    if kind == "decoder_block":
        terms["segments"] = features.num_segments
    return terms


def _encoder_block_terms(
    kind: str, features: MicrobatchFeatures, dims: flops.ModelDims
) -> dict[str, FloatArray]:
    """Terms of an encoder block; the sums are those of the blocks that the encoder has."""
    vision, name = dims.vision, _ATTENTION_SUMS[kind]
    if kind not in vision.layer_kinds:
        raise CostModelError(
            f"the blocks of a {type(vision).__name__} encoder must be of kind "
            f"{sorted(set(vision.layer_kinds))}, found {kind!r}. Use the dimensions of the profiled model."
        )
    terms = {"flops": flops.vision_block_flops(vision, features.encoder_inputs)}
    if name is not None:
        squared: FloatArray = getattr(features, name)
        terms["attention_flops"] = flops.attention_flops(squared, vision.hidden, causal=False)
    return terms


class AnalyticPrior:
    """Non-negative least squares of time on the terms of one layer kind and direction.

    Each row is weighted by the inverse of its time, so that the relative error counts: a slow row
    does not drown a fast one.

    Parameters
    ----------
    kind : str
        One of :data:`~dflop_ds.cost.features.LAYER_KINDS`.
    direction : {"forward", "backward"}
    dims : ModelDims

    Attributes
    ----------
    coefficients_ : dict of str to float
        Seconds per unit of each term, none negative; ``"overhead"`` is in seconds per launch.
    """

    coefficients_: dict[str, float]

    def __init__(self, kind: str, direction: Direction, dims: flops.ModelDims) -> None:
        self.kind = kind
        self.direction = direction
        self.dims = dims

    def fit(self, features: MicrobatchFeatures, measured_s: FloatArray) -> AnalyticPrior:
        """Fit the coefficients.

        Parameters
        ----------
        features : MicrobatchFeatures, n microbatches
        measured_s : ndarray, shape (n,)
            Seconds per layer. All zero (a layer without this direction) predicts zero.

        Raises
        ------
        CostModelError
            If a time is negative, NaN or infinite, or fewer than two different sizes were measured.
        """
        target_s = np.asarray(measured_s, dtype=np.float64)
        self._check(features, target_s)
        terms = {OVERHEAD: np.ones(len(features))} | prior_terms(
            self.kind, self.direction, features, self.dims
        )
        self.coefficients_ = dict.fromkeys(terms, 0.0)
        positive_s = target_s[target_s > 0]
        if positive_s.size == 0:
            return self
        weights = 1.0 / np.maximum(target_s, _WEIGHT_FLOOR * float(np.median(positive_s)))
        self.coefficients_ |= fit_non_negative(terms, target_s, weights)
        return self

    def predict(self, features: MicrobatchFeatures, overhead_share: float = 1.0) -> FloatArray:
        """Seconds per layer, shape (n,).

        Parameters
        ----------
        features : MicrobatchFeatures, n microbatches
        overhead_share : float
            Part of the launch overhead to charge; below 1 for samples that share a microbatch.

        Raises
        ------
        CostModelError
            If the prior has not been fitted.
        """
        if not hasattr(self, "coefficients_"):
            raise CostModelError(
                "the analytic prior must be fitted before it predicts, found none. Call fit first."
            )
        time_s = np.full(len(features), self.coefficients_[OVERHEAD] * overhead_share)
        # Term by term instead of a matrix product: rounding then keeps the order of sizes, and a row's
        # result does not depend on the rows beside it.
        for name, term in prior_terms(self.kind, self.direction, features, self.dims).items():
            time_s += self.coefficients_[name] * term
        return time_s

    @classmethod
    def from_coefficients(
        cls, kind: str, direction: Direction, dims: flops.ModelDims, coefficients: Mapping[str, float]
    ) -> AnalyticPrior:
        """Fitted prior from stored coefficients.

        Raises
        ------
        CostModelError
            If a coefficient is missing, unknown, negative, NaN or infinite.
        """
        empty = MicrobatchFeatures(*(np.zeros(0) for _ in range(6)))
        expected = {OVERHEAD, *prior_terms(kind, direction, empty, dims)}
        if set(coefficients) != expected or not all(0 <= value < np.inf for value in coefficients.values()):
            raise CostModelError(
                f"the {direction} prior of {kind!r} must have finite, non-negative coefficients "
                f"{sorted(expected)}, found {dict(coefficients)}. Fit the cost model again."
            )
        prior = cls(kind, direction, dims)
        prior.coefficients_ = {name: float(value) for name, value in coefficients.items()}
        return prior

    def _check(self, features: MicrobatchFeatures, target_s: FloatArray) -> None:
        bad = ~(np.isfinite(target_s) & (target_s >= 0))
        if target_s.shape != (len(features),) or bad.any():
            raise CostModelError(
                f"{self.direction} times of {self.kind!r} must be {len(features)} finite seconds >= 0, "
                f"found {target_s.size} of which {int(bad.sum())} are not. Profile the layer again."
            )
        num_sizes = len(np.unique(features.matrix(self.kind), axis=0))
        if num_sizes < 2:
            raise CostModelError(
                f"layer kind {self.kind!r} must be profiled at two or more sizes, found {num_sizes}. "
                "Add sizes to the profile."
            )


def fit_non_negative(
    terms: Mapping[Name, FloatArray], target_s: FloatArray, weights: FloatArray
) -> dict[Name, float]:
    """Non-negative least squares of a time on named terms.

    Parameters
    ----------
    terms : mapping of name to ndarray, shape (n,)
    target_s : ndarray, shape (n,)
        Seconds.
    weights : ndarray, shape (n,)
        Factor of each row's residual.

    Returns
    -------
    dict of name to float
        Coefficients of the terms that the rows can tell apart; the others stay out.
    """
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    names: list[Name] = []
    columns: list[FloatArray] = []
    scales: list[float] = []
    basis: list[FloatArray] = []
    for name, term in terms.items():
        weighted = weights * term
        scale = float(np.linalg.norm(weighted))
        if scale == 0.0:
            continue
        rest = weighted / scale
        for direction in basis + basis:  # twice: Gram-Schmidt loses accuracy on nearly parallel columns
            rest = rest - np.dot(direction, rest) * direction
        if float(np.linalg.norm(rest)) < _RANK_TOLERANCE:
            continue
        basis.append(rest / np.linalg.norm(rest))
        names.append(name)
        columns.append(weighted / scale)
        scales.append(scale)
    if not columns:
        return {}
    solution, _ = nnls(np.column_stack(columns), weights * target_s)
    return {name: float(value / scale) for name, value, scale in zip(names, solution, scales, strict=True)}
