"""Predicted seconds of one layer of a kind, from the sizes of a microbatch.

The prediction is an analytic prior times the exponential of a boosted-tree residual.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflop_ds.cost.features import (
    LAYER_KINDS,
    FloatArray,
    MicrobatchFeatures,
    ProfileRow,
    check_rows,
    check_times,
    feature_names,
)
from dflop_ds.cost.files import check_schema, read_json, write_json
from dflop_ds.cost.prior import DIRECTIONS, AnalyticPrior, Direction
from dflop_ds.cost.trees import MIN_TREE_ROWS, TreeEnsemble, fit_residual_trees, trees_help
from dflop_ds.errors import CostModelError
from dflop_ds.flops import ModelDims

SCHEMA_VERSION = 1

_logger = logging.getLogger(__name__)


class LayerCostModel:
    """Predicted seconds of one layer of a kind, forward and backward.

    Prediction = prior x exp(residual). The prior is a non-negative sum of FLOP and byte terms; the
    residual comes from trees that are non-decreasing in every feature and clipped to the range seen in
    training. Kinds with fewer than 50 rows, and kinds for which trees do not lower the error on rows left
    out of the fit, use the prior alone. Outside the profiled sizes the residual
    keeps its edge value and the prior extrapolates; the first time, a warning names the feature.

    Parameters
    ----------
    warn : bool
        Whether to log sizes outside the profiled range, and kinds without trees.

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

    def __init__(self, *, warn: bool = True) -> None:
        self._warn = warn
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
            If :func:`check_rows` or :func:`check_times` refuses the rows, or a kind was profiled at fewer
            than two sizes.
        """
        all_rows = list(rows)
        check_rows(all_rows)
        check_times(all_rows)
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
    def from_dict(cls, content: Mapping[str, Any], *, warn: bool = True) -> LayerCostModel:
        """Model that predicts the same bits as the one that :meth:`to_dict` was called on.

        Raises
        ------
        CostModelError
            If the content is damaged or of another schema.
        """
        check_schema(content, "cost model", SCHEMA_VERSION)
        model = cls(warn=warn)
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
            if self._warn:
                _logger.info(message, kind, direction, usable.sum(), MIN_TREE_ROWS)
            return
        log_residual = np.log(time_s[usable] / prior_s[usable])
        matrix = features.matrix(kind)[usable]
        if not trees_help(matrix, log_residual):
            return
        self.trees_[kind, direction] = fit_residual_trees(matrix, log_residual)

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
        if not self._warn or not len(matrix):
            return
        lows, highs = matrix.min(axis=0), matrix.max(axis=0)
        message = "%s of %s was profiled from %g to %g, found %g to %g: the prior extrapolates. Profile them."
        for column, name in enumerate(feature_names(kind)):
            low, high = self.ranges_[kind][column]
            if (lows[column] < low or highs[column] > high) and (kind, name) not in self._warned:
                self._warned.add((kind, name))
                _logger.warning(message, name, kind, low, high, lows[column], highs[column])
