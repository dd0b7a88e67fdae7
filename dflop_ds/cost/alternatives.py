"""What the cost model is compared with: simpler predictors, fitted on the same rows.

All of them answer ``predict(kind, features)`` as :class:`~dflop_ds.cost.layer_model.LayerCostModel` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dflop_ds.cost.features import LAYER_KINDS, FloatArray, MicrobatchFeatures, ProfileRow, check_rows
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.prior import DIRECTIONS, Direction, fit_non_negative, prior_terms
from dflop_ds.cost.trees import MIN_TREE_ROWS, TreeEnsemble, fit_residual_trees
from dflop_ds.flops import ModelDims

_KNOTS = (12, 4)
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
_ATTENTION_OF_KIND = {
    "vision_window_block": "sum_squared_windows",
    "vision_frame_block": "sum_squared_frames",
    "decoder_block": "sum_squared_tokens",
}


class LayerPredictor(Protocol):
    """Anything that predicts the forward and backward seconds of one layer."""

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """Seconds of one layer on each microbatch, forward and backward, each of shape (n,)."""


class ThroughputInterpolation:
    """Time = work / throughput, the throughput interpolated over a size, as in DFLOP (arXiv 2603.25120).

    Attention is taken apart from the other work of a layer, as there: its throughput depends on the mean
    length of the sequences that attend, that of the rest on the tiles or tokens of the whole microbatch.
    The work is counted in FLOPs (in bytes, for layers that compute nothing). Profile rows time whole
    layers, so the seconds per unit of work at 12 sizes (at 4 lengths for attention), the means of
    neighbouring rows, are found by non-negative least squares; between them they are linear, outside
    constant.
    """

    def __init__(self, rows: Sequence[ProfileRow], dims: ModelDims) -> None:
        check_rows(rows)
        self._dims = dims
        self._sizes: dict[str, list[FloatArray]] = {}
        self._seconds_per_work: dict[tuple[str, Direction], FloatArray] = {}
        for kind, kind_rows in _by_kind(rows).items():
            features = MicrobatchFeatures.from_rows(kind_rows)
            parts = self._parts(kind, "forward", features)
            self._sizes[kind] = [
                _group_means(size, num) for (_, size), num in zip(parts, _KNOTS, strict=False)
            ]
            for direction in DIRECTIONS:
                time_s = _seconds(kind_rows, direction)
                columns = dict(enumerate(self._columns(kind, direction, features).T))
                fitted = fit_non_negative(columns, time_s, 1.0 / np.maximum(time_s, 1e-12))
                self._seconds_per_work[kind, direction] = np.array([fitted.get(k, 0.0) for k in columns])

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """As :meth:`LayerPredictor.predict`."""
        forward_s, backward_s = (
            self._columns(kind, direction, features) @ self._seconds_per_work[kind, direction]
            for direction in DIRECTIONS
        )
        return forward_s, backward_s

    def _parts(
        self, kind: str, direction: Direction, features: MicrobatchFeatures
    ) -> list[tuple[FloatArray, FloatArray]]:
        """Work, and the size that its throughput depends on."""
        terms = prior_terms(kind, direction, features, self._dims)
        size: FloatArray = getattr(features, _SIZE_OF_KIND[kind])
        parts = [(terms["flops"] if "flops" in terms else terms["bytes"], size)]
        if kind in _ATTENTION_OF_KIND:
            squared: FloatArray = getattr(features, _ATTENTION_OF_KIND[kind])
            parts.append((terms["attention_flops"], squared / np.maximum(size, 1.0)))
        return parts

    def _columns(self, kind: str, direction: Direction, features: MicrobatchFeatures) -> FloatArray:
        """Work of each microbatch, shared out between the two sizes that enclose its own."""
        parts = self._parts(kind, direction, features)
        return np.hstack(
            [
                work[:, np.newaxis]
                * np.column_stack([np.interp(size, sizes, unit) for unit in np.eye(len(sizes))])
                for (work, size), sizes in zip(parts, self._sizes[kind], strict=True)
            ]
        )


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


def _group_means(size: FloatArray, num_groups: int) -> FloatArray:
    """Mean sizes of groups of rows with neighbouring sizes, increasing."""
    groups = np.array_split(np.sort(size), min(num_groups, len(size)))
    return np.unique([group.mean() for group in groups])
