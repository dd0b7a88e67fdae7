"""The cost model: predicted seconds of layers, of pipeline stages and of single samples.

:class:`LayerCostModel` predicts one layer of a kind from the sizes of a microbatch: an analytic prior
times the exponential of a boosted-tree residual. :class:`CostModel` adds layers up to stages and states
what a sample contributes to the microbatch that it will share.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflop_ds.cost.features import (
    LAYER_KINDS,
    FloatArray,
    MicrobatchFeatures,
    ProfileRow,
    check_kind,
    check_rows,
    feature_names,
)
from dflop_ds.cost.prior import DIRECTIONS, AnalyticPrior, Direction
from dflop_ds.cost.trees import MIN_TREE_ROWS, TreeEnsemble, fit_residual_trees
from dflop_ds.errors import CostModelError
from dflop_ds.flops import ModelDims
from dflop_ds.shapes import ShapeTable

__all__ = ("CostModel", "LayerCostModel", "ProfileRow", "SampleCosts")

SCHEMA_VERSION = 1
SAMPLES_PER_BIN = 8.0

_logger = logging.getLogger(__name__)


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write an artifact in one step: readers see the old file or the whole new one."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, allow_nan=False, default=operator.index), encoding="utf-8")
    partial.replace(target)


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read one JSON object; :class:`CostModelError` if the file is missing, truncated or not an object."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CostModelError(f"{path} must be a readable {what} (JSON); {error}. Write it again.") from error
    if not isinstance(content, dict):
        raise CostModelError(f"{path} must be one {what}, found a {type(content).__name__}. Write it again.")
    return content


def check_schema(content: Mapping[str, Any], what: str, supported: int) -> None:
    """Raise :class:`CostModelError` unless an artifact has the supported ``schema_version``."""
    found = content.get("schema_version")
    if found != supported:
        newer = isinstance(found, int) and found > supported
        remedy = "Upgrade dflop_ds" if newer else "Write it again with this version"
        raise CostModelError(f"a {what} must have schema_version {supported}, found {found!r}. {remedy}.")


class LayerCostModel:
    """Predicted seconds of one layer of a kind, forward and backward.

    Prediction = prior x exp(residual). The prior is a non-negative sum of FLOP and byte terms; the
    residual comes from trees that are non-decreasing in every feature and clipped to the range seen in
    training. Kinds with fewer than 50 rows use the prior alone. Outside the profiled sizes the residual
    keeps its edge value and the prior extrapolates; the first time, a warning names the feature.

    Attributes
    ----------
    dims_ : ModelDims
    priors_ : dict of (str, str) to AnalyticPrior
        By layer kind and direction.
    trees_ : dict of (str, str) to TreeEnsemble
        Present where trees are used.
    ranges_ : dict of str to list of [float, float]
        Profiled range of every feature of a kind.
    """

    dims_: ModelDims
    priors_: dict[tuple[str, Direction], AnalyticPrior]
    trees_: dict[tuple[str, Direction], TreeEnsemble]
    ranges_: dict[str, list[list[float]]]

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def fit(self, rows: Iterable[ProfileRow], dims: ModelDims) -> LayerCostModel:
        """Fit every layer kind that occurs in the rows.

        Parameters
        ----------
        rows : iterable of ProfileRow
        dims : ModelDims
            Dimensions of the profiled model.

        Raises
        ------
        CostModelError
            If :func:`check_rows` refuses the rows, or a kind was profiled at fewer than two sizes.
        """
        all_rows = list(rows)
        check_rows(all_rows)
        self.dims_, self.priors_, self.trees_, self.ranges_ = dims, {}, {}, {}
        self._warned.clear()
        for kind in LAYER_KINDS:
            kind_rows = [row for row in all_rows if row.kind == kind]
            if not kind_rows:
                continue
            features = MicrobatchFeatures.from_rows(kind_rows)
            matrix = features.matrix(kind)
            self.ranges_[kind] = np.column_stack([matrix.min(axis=0), matrix.max(axis=0)]).tolist()
            for direction in DIRECTIONS:
                measured_s = np.array([getattr(row, f"{direction}_s") for row in kind_rows], dtype=np.float64)
                self._fit_one(kind, direction, features, measured_s)
        return self

    def predict(self, kind: str, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """Seconds of one layer on each microbatch.

        Parameters
        ----------
        kind : str
            One of :data:`~dflop_ds.cost.features.LAYER_KINDS`.
        features : MicrobatchFeatures, n microbatches

        Returns
        -------
        forward_s, backward_s : ndarray, shape (n,)
            Finite, not negative and non-decreasing in every size. Exactly 0 for the encoder and the
            projector on a microbatch without encoder inputs.

        Raises
        ------
        CostModelError
            If the model is not fitted, or was fitted without this kind.
        """
        return self._predict_at(kind, features, features.matrix(kind), 1.0)

    def predict_marginal(
        self, kind: str, features: MicrobatchFeatures, samples_per_bin: float
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds that each sample adds to one layer when it shares a microbatch with average samples.

        The terms of the prior add up over the samples, so a sample is charged its own terms and
        ``1 / k`` of the launch overhead, where k is the expected number of samples with work for this
        layer in a microbatch that has any: ``samples_per_bin * p / (1 - (1 - p)^samples_per_bin)`` if a
        share p of the samples has. The residual, which does not add up, is taken where the microbatch
        will be: at the sample plus ``k - 1`` average ones. For ``k = 1`` this is :meth:`predict`.

        Parameters
        ----------
        kind : str
        features : MicrobatchFeatures
            One sample per entry.
        samples_per_bin : float
            Samples in a typical microbatch, at least 1.

        Returns
        -------
        forward_s, backward_s : ndarray, shape (n,)
            Finite, not negative, non-decreasing in the size of a sample for a fixed average.
        """
        if not 1.0 <= samples_per_bin < math.inf:
            raise CostModelError(
                f"samples_per_bin must be 1 or more, found {samples_per_bin}. Use samples / bins."
            )
        matrix = features.matrix(kind)
        works = features.work_mask(kind)
        if not works.any():
            return np.zeros(len(features)), np.zeros(len(features))
        share = float(works.mean())
        sharing = max(1.0, samples_per_bin * share / (1.0 - (1.0 - share) ** samples_per_bin))
        operating_point = matrix + (sharing - 1.0) * matrix[works].mean(axis=0)
        return self._predict_at(kind, features, operating_point, 1.0 / sharing)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts for JSON."""
        self._check_fitted()
        kinds: dict[str, Any] = {}
        for kind, ranges in self.ranges_.items():
            kinds[kind] = {"ranges": ranges}
            for direction in DIRECTIONS:
                trees = self.trees_.get((kind, direction))
                kinds[kind][direction] = {
                    "prior": self.priors_[kind, direction].coefficients_,
                    "trees": None if trees is None else trees.to_dict(),
                }
        return {"schema_version": SCHEMA_VERSION, "dims": self.dims_.to_dict(), "kinds": kinds}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LayerCostModel:
        """Model that predicts the same bits as the one that :meth:`to_dict` was called on.

        Raises
        ------
        CostModelError
            If the content is damaged or of another schema.
        """
        check_schema(content, "cost model", SCHEMA_VERSION)
        model = cls()
        model.priors_, model.trees_, model.ranges_ = {}, {}, {}
        try:
            model.dims_ = ModelDims.from_dict(content["dims"])
            for kind, parts in content["kinds"].items():
                model.ranges_[kind] = [[float(low), float(high)] for low, high in parts["ranges"]]
                if len(model.ranges_[kind]) != len(feature_names(kind)):
                    raise ValueError(f"{kind} has {len(model.ranges_[kind])} ranges")
                for direction in DIRECTIONS:
                    stored = parts[direction]
                    prior = AnalyticPrior.from_coefficients(kind, direction, model.dims_, stored["prior"])
                    model.priors_[kind, direction] = prior
                    if stored["trees"] is not None:
                        model.trees_[kind, direction] = TreeEnsemble.from_dict(stored["trees"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CostModelError(f"a cost model must be complete, found {error!r}. Fit it again.") from error
        return model

    def save(self, path: str | Path) -> None:
        """Write the model as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> LayerCostModel:
        """Read a model written by :meth:`save`; a missing or damaged file raises as in :meth:`from_dict`."""
        return cls.from_dict(read_json(path, "cost model"))

    def _fit_one(
        self, kind: str, direction: Direction, features: MicrobatchFeatures, time_s: FloatArray
    ) -> None:
        prior = AnalyticPrior(kind, direction, self.dims_).fit(features, time_s)
        self.priors_[kind, direction] = prior
        prior_s = prior.predict(features)
        usable = (time_s > 0) & (prior_s > 0)
        if usable.sum() < MIN_TREE_ROWS:
            message = "%s %s: %d usable rows, fewer than %d; the analytic prior is used alone"
            _logger.info(message, kind, direction, usable.sum(), MIN_TREE_ROWS)
            return
        log_residual = np.log(time_s[usable] / prior_s[usable])
        self.trees_[kind, direction] = fit_residual_trees(features.matrix(kind)[usable], log_residual)

    def _predict_at(
        self, kind: str, features: MicrobatchFeatures, residual_at: FloatArray, overhead_share: float
    ) -> tuple[FloatArray, FloatArray]:
        works = features.work_mask(kind)
        if not works.any():
            return np.zeros(len(features)), np.zeros(len(features))
        self._check_fitted(kind)
        self._warn_outside(kind, residual_at[works])
        times_s: list[FloatArray] = []
        for direction in DIRECTIONS:
            time_s = self.priors_[kind, direction].predict(features, overhead_share)
            trees = self.trees_.get((kind, direction))
            if trees is not None:
                time_s *= np.exp(trees.predict(residual_at))
            times_s.append(np.where(works, time_s, 0.0))
        return times_s[0], times_s[1]

    def _check_fitted(self, kind: str | None = None) -> None:
        if not hasattr(self, "priors_"):
            raise CostModelError(
                "a cost model must be fitted before use, found neither fit nor load. Call one."
            )
        if kind is not None and kind not in self.ranges_:
            raise CostModelError(
                f"the cost model must have been fitted with rows of {kind!r}, found {sorted(self.ranges_)}. "
                "Profile this layer kind."
            )

    def _warn_outside(self, kind: str, matrix: FloatArray) -> None:
        if not len(matrix):
            return
        lows, highs = matrix.min(axis=0), matrix.max(axis=0)
        message = "%s of %s was profiled from %g to %g, found %g to %g: the prior extrapolates. Profile them."
        for column, name in enumerate(feature_names(kind)):
            low, high = self.ranges_[kind][column]
            if (lows[column] < low or highs[column] > high) and (kind, name) not in self._warned:
                self._warned.add((kind, name))
                _logger.warning(message, name, kind, low, high, lows[column], highs[column])


@dataclasses.dataclass(frozen=True)
class SampleCosts:
    """Additive costs of samples, for the scheduler.

    Attributes
    ----------
    forward_s, backward_s : ndarray, shape (n, num_stages)
        Seconds that each sample adds to the time of each stage.
    """

    forward_s: FloatArray
    backward_s: FloatArray


class CostModel:
    """Predicted seconds of pipeline stages and of samples.

    Parameters
    ----------
    layer_model : LayerCostModel
        Fitted for every kind in `stages`.
    stages : sequence of sequences of str
        Layer kinds of each stage, one entry per layer.

    Raises
    ------
    CostModelError
        If there is no stage, or a kind is unknown.
    """

    def __init__(self, layer_model: LayerCostModel, stages: Sequence[Sequence[str]]) -> None:
        if not stages:
            raise CostModelError("a cost model must have at least one stage, found none. Pass their layers.")
        self.layer_model = layer_model
        self.stages = tuple(tuple(stage) for stage in stages)
        for kind in (kind for stage in self.stages for kind in stage):
            check_kind(kind)

    def stage_times(self, features: MicrobatchFeatures) -> tuple[FloatArray, FloatArray]:
        """Seconds of every stage on every microbatch.

        Parameters
        ----------
        features : MicrobatchFeatures, n microbatches

        Returns
        -------
        forward_s, backward_s : ndarray, shape (n, num_stages)
        """
        times_s = {kind: self.layer_model.predict(kind, features) for kind in self._kinds()}
        return self._compose(times_s, len(features))

    def sample_costs(self, table: ShapeTable, samples_per_bin: float = SAMPLES_PER_BIN) -> SampleCosts:
        """Additive costs of the samples, around the microbatch that they will share.

        See :meth:`LayerCostModel.predict_marginal` for the rule. The launch overhead is charged once
        per microbatch, not once per sample, so costs add up to the time of a microbatch of about
        `samples_per_bin` samples drawn from `table`.

        Parameters
        ----------
        table : ShapeTable, n samples
            The global batch: its mean is the average sample.
        samples_per_bin : float
            Samples in a typical microbatch: samples of the global batch / bins.
        """
        features = MicrobatchFeatures.from_shapes(table)
        predict = self.layer_model.predict_marginal
        costs_s = {kind: predict(kind, features, samples_per_bin) for kind in self._kinds()}
        return SampleCosts(*self._compose(costs_s, len(table)))

    def additivity_error(self, table: ShapeTable, bins: Sequence[Sequence[int]]) -> float:
        """Mean over bins and stages of ``|sum of sample costs - predicted time| / predicted time``.

        Forward and backward are added first. Stages without work in a bin are left out.

        Parameters
        ----------
        table : ShapeTable
        bins : sequence of sequences of int
            Positions in `table`; empty bins are left out.
        """
        filled = [list(positions) for positions in bins if len(positions)]
        if not filled:
            return 0.0
        features = MicrobatchFeatures.from_bins(table, filled)
        predicted_s = np.add(*self.stage_times(features))
        flat = [position for positions in filled for position in positions]
        costs = self.sample_costs(table.take(flat), samples_per_bin=len(flat) / len(filled))
        starts = np.cumsum([0] + [len(positions) for positions in filled[:-1]])
        summed_s = np.add.reduceat(costs.forward_s + costs.backward_s, starts, axis=0)
        busy = predicted_s > 0
        errors = np.abs(summed_s - predicted_s)[busy] / predicted_s[busy]
        return float(errors.mean()) if errors.size else 0.0

    def _kinds(self) -> list[str]:
        used = {kind for stage in self.stages for kind in stage}
        return [kind for kind in LAYER_KINDS if kind in used]

    def _compose(
        self, layer_times_s: Mapping[str, tuple[FloatArray, FloatArray]], num_rows: int
    ) -> tuple[FloatArray, FloatArray]:
        forward_s = np.zeros((num_rows, len(self.stages)))
        backward_s = np.zeros_like(forward_s)
        for kind, (kind_forward_s, kind_backward_s) in layer_times_s.items():
            counts = np.array([stage.count(kind) for stage in self.stages], dtype=np.float64)
            forward_s += kind_forward_s[:, np.newaxis] * counts
            backward_s += kind_backward_s[:, np.newaxis] * counts
        return forward_s, backward_s
