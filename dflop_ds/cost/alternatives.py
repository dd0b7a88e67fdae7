"""What the cost model is compared with: simpler predictors, fitted on the same rows.

All of them answer ``predict(kind, features)`` as :class:`~dflop_ds.cost.layer_model.LayerCostModel` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dflop_ds.cost.features import LAYER_KINDS, FloatArray, MicrobatchFeatures, ProfileRow, check_rows
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.prior import DIRECTIONS, Direction, prior_terms
from dflop_ds.cost.trees import MIN_TREE_ROWS, TreeEnsemble, fit_residual_trees
from dflop_ds.flops import ModelDims

_KNOTS = 12
_SIZE_OF_KIND = {
    "vision_embed": "encoder_inputs",
    "vision_block": "encoder_inputs",
    "vision_window_block": "encoder_inputs",
    "vision_frame_block": "encoder_inputs",
    "projector": "encoder_inputs",
    "token_embed": "llm_tokens",
    "decoder_block": "llm_tokens",
    "norm": "llm_tokens",
    "head": "target_tokens",
}


class LayerPredictor(Protocol):
    """Anything that predicts the forward and backward seconds of one layer."""

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """Seconds of one layer on each microbatch, forward and backward, each of shape (n,)."""


class ThroughputInterpolation:
    """Time = work / throughput, the throughput interpolated over one size, as in DFLOP (arXiv 2603.25120).

    The work is the FLOPs of a layer (the bytes, for layers that compute nothing) and the size is the
    number of tiles for the encoder, of tokens for the LLM. The throughputs measured at nearby sizes are
    averaged to 12 points; between them the throughput is linear, outside them constant.
    """

    def __init__(self, rows: Sequence[ProfileRow], dims: ModelDims) -> None:
        check_rows(rows)
        self._dims = dims
        self._curves: dict[tuple[str, Direction], tuple[FloatArray, FloatArray]] = {}
        for kind, kind_rows in _by_kind(rows).items():
            features = MicrobatchFeatures.from_rows(kind_rows)
            size: FloatArray = getattr(features, _SIZE_OF_KIND[kind])
            for direction in DIRECTIONS:
                time_s = _seconds(kind_rows, direction)
                throughput = self._work(kind, direction, features) / np.maximum(time_s, 1e-12)
                self._curves[kind, direction] = _curve(size, throughput)

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """As :meth:`LayerPredictor.predict`."""
        size: FloatArray = getattr(features, _SIZE_OF_KIND[kind])
        forward_s, backward_s = (
            self._work(kind, direction, features)
            / np.maximum(np.interp(size, *self._curves[kind, direction]), 1e-12)
            for direction in DIRECTIONS
        )
        return forward_s, backward_s

    def _work(self, kind: str, direction: Direction, features: MicrobatchFeatures) -> FloatArray:
        terms = prior_terms(kind, direction, features, self._dims)
        counted = [term for name, term in terms.items() if name.endswith("flops")] or [terms["bytes"]]
        work: FloatArray = np.sum(counted, axis=0, dtype=np.float64)
        return work


class TreesAlone:
    """Boosted trees on the logarithm of the time, without a prior; flat outside the profiled range.

    A layer kind with fewer rows than trees need is predicted by its geometric mean, a tree of one leaf.
    """

    def __init__(self, rows: Sequence[ProfileRow]) -> None:
        check_rows(rows)
        self._trees: dict[tuple[str, Direction], TreeEnsemble | float] = {}
        for kind, kind_rows in _by_kind(rows).items():
            matrix = MicrobatchFeatures.from_rows(kind_rows).matrix(kind)
            for direction in DIRECTIONS:
                time_s = _seconds(kind_rows, direction)
                positive = time_s > 0
                log_time = np.log(time_s[positive])
                if len(log_time) < MIN_TREE_ROWS:
                    mean_s = float(np.exp(log_time.mean())) if len(log_time) else 0.0
                    self._trees[kind, direction] = mean_s
                else:
                    self._trees[kind, direction] = fit_residual_trees(matrix[positive], log_time)

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """As :meth:`LayerPredictor.predict`."""
        works = features.work_mask(kind)
        times_s: list[FloatArray] = []
        for direction in DIRECTIONS:
            trees = self._trees[kind, direction]
            if isinstance(trees, float):
                times_s.append(np.where(works, trees, 0.0))
            else:
                times_s.append(np.where(works, np.exp(trees.predict(features.matrix(kind))), 0.0))
        return times_s[0], times_s[1]


def prior_alone(model: LayerCostModel) -> LayerCostModel:
    """The fitted model without its trees."""
    content = model.to_dict()
    for kind in content["kinds"].values():
        for direction in DIRECTIONS:
            kind[direction] = {**kind[direction], "trees": None}
    return LayerCostModel.from_dict(content, warn=False)


def fit_predictors(rows: Sequence[ProfileRow], dims: ModelDims) -> dict[str, LayerPredictor]:
    """The cost model and its three alternatives, fitted on the same rows, by name."""
    model = LayerCostModel(warn=False).fit(rows, dims)
    return {
        "cost model": model,
        "throughput interpolation": ThroughputInterpolation(rows, dims),
        "prior alone": prior_alone(model),
        "trees alone": TreesAlone(rows),
    }


def _by_kind(rows: Sequence[ProfileRow]) -> dict[str, list[ProfileRow]]:
    found = {kind: [row for row in rows if row.kind == kind] for kind in LAYER_KINDS}
    return {kind: kind_rows for kind, kind_rows in found.items() if kind_rows}


def _seconds(rows: Sequence[ProfileRow], direction: Direction) -> FloatArray:
    return np.array([getattr(row, f"{direction}_s") for row in rows], dtype=np.float64)


def _curve(size: FloatArray, throughput: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean size and throughput of groups of rows with neighbouring sizes, by increasing size."""
    order = np.argsort(size, kind="stable")
    groups = np.array_split(order, min(_KNOTS, len(order)))
    sizes = np.array([size[group].mean() for group in groups])
    return sizes, np.array([throughput[group].mean() for group in groups])
