"""The learned part of the cost model: boosted trees on the log of measured over prior time.

The trees are fitted with scikit-learn and exported as plain arrays, so that prediction needs numpy only
and a model that went through JSON predicts the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray
from dflop_ds.errors import CostModelError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MIN_TREE_ROWS = 50
"""Fewer rows than this are left to the prior: boosting with small leaves would fit their noise."""

_NUM_TREES = 50
_LEARNING_RATE = 0.15
_MAX_LEAVES = 8
_MAX_DEPTH = 3
_MIN_LEAF_ROWS = 10
_GAIN = 0.97
_ARRAYS: dict[str, type] = {
    "roots": np.int64,
    "feature": np.int64,
    "threshold": np.float64,
    "left": np.int64,
    "right": np.int64,
    "value": np.float64,
    "missing_left": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class TreeEnsemble:
    """A sum of regression trees over one flat array of nodes.

    A row goes left when its feature is at most the threshold, or when it is NaN and `missing_left`
    holds. A leaf names itself as both children. The sum is clipped to ``[low, high]``.

    Attributes
    ----------
    num_features : int
        Columns that a row must have.
    baseline, low, high : float
        Start of the sum and its limits.
    roots : ndarray of int64, shape (num_trees,)
        Node of each tree at which a row starts.
    feature, left, right : ndarray of int64, shape (num_nodes,)
    threshold, value : ndarray of float64, shape (num_nodes,)
    missing_left : ndarray of bool, shape (num_nodes,)

    Raises
    ------
    CostModelError
        If the arrays do not describe trees.
    """

    num_features: int
    baseline: float
    low: float
    high: float
    roots: IntArray
    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    value: FloatArray
    missing_left: BoolArray

    def __post_init__(self) -> None:
        num_nodes = len(self.feature)
        nodes = np.arange(num_nodes)
        same_length = all(len(getattr(self, name)) == num_nodes for name in _ARRAYS if name != "roots")
        sound = (
            same_length
            and bool(np.all((self.roots >= 0) & (self.roots < num_nodes)))
            and bool(np.all((self.feature >= 0) & (self.feature < self.num_features)))
            and bool(
                np.all(
                    (self.left > nodes) & (self.right > nodes) | (self.left == nodes) & (self.right == nodes)
                )
            )
            and bool(np.all((self.left < num_nodes) & (self.right < num_nodes)))
            and bool(np.all(np.isfinite(self.value)) and np.all(np.isfinite(self.threshold)))
            and bool(np.isfinite([self.baseline, self.low, self.high]).all())
            and self.low <= self.high
        )
        if not sound:
            raise CostModelError(
                "trees must have equally long node arrays, children after their parent and finite values; "
                f"found {num_nodes} nodes that break this. Fit the cost model again."
            )

    def predict(self, matrix: FloatArray) -> FloatArray:
        """Clipped sum of the trees.

        Parameters
        ----------
        matrix : ndarray, shape (n, num_features)

        Returns
        -------
        ndarray, shape (n,)
        """
        if matrix.ndim != 2 or matrix.shape[1] != self.num_features:
            raise CostModelError(
                f"trees must be given {self.num_features} features per row, found shape {matrix.shape}. "
                "Use the features of the layer kind that the trees were fitted for."
            )
        # Rows between the same thresholds of every feature reach the same leaves: one of them is enough.
        _, first, inverse = np.unique(self._cells(matrix), return_index=True, return_inverse=True)
        leaves = self._leaves(matrix[first])
        total = np.full(len(first), self.baseline)
        for leaf in leaves:  # in order, so that a row's sum does not depend on the rows beside it
            total += self.value[leaf]
        clipped: FloatArray = np.clip(total, self.low, self.high)
        return clipped[inverse]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists for JSON."""
        plain: dict[str, Any] = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return plain | {name: getattr(self, name) for name in ("num_features", "baseline", "low", "high")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TreeEnsemble:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        CostModelError
            If a field is missing or the arrays do not describe trees.
        """
        try:
            arrays: dict[str, Any] = {
                name: np.array(data[name], dtype=dtype) for name, dtype in _ARRAYS.items()
            }
            scalars: dict[str, Any] = {name: float(data[name]) for name in ("baseline", "low", "high")}
            num_features = int(data["num_features"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CostModelError(
                f"stored trees must have every field of TreeEnsemble; {error!r}. Fit the cost model again."
            ) from error
        return cls(num_features=num_features, **scalars, **arrays)

    def _cells(self, matrix: FloatArray) -> IntArray:
        """Number of the cell of the threshold grid that each row lies in, shape (n,)."""
        cells = np.zeros(len(matrix), dtype=np.int64)
        inner = self.left != np.arange(len(self.left))
        for column in range(self.num_features):
            thresholds = np.unique(self.threshold[inner & (self.feature == column)])
            position = np.searchsorted(thresholds, matrix[:, column], side="left")
            position[np.isnan(matrix[:, column])] = len(thresholds) + 1
            # Renumbered column by column, so that the product of the grid sides cannot overflow.
            cells = np.unique(cells * (len(thresholds) + 2) + position, return_inverse=True)[1]
        return cells

    def _leaves(self, matrix: FloatArray) -> IntArray:
        """Leaf that each row reaches in each tree, shape (num_trees, n)."""
        rows = np.arange(len(matrix))
        node = np.repeat(self.roots[:, np.newaxis], len(matrix), axis=1)
        while True:
            value = matrix[rows, self.feature[node]]
            goes_left = value <= self.threshold[node]
            missing = np.isnan(value)
            if missing.any():
                goes_left |= missing & self.missing_left[node]
            following = np.where(goes_left, self.left[node], self.right[node])
            if np.array_equal(following, node):
                return node
            node = following


def fit_residual_trees(
    matrix: FloatArray,
    log_residual: FloatArray,
    weights: FloatArray | None = None,
    num_trees: int = _NUM_TREES,
) -> TreeEnsemble:
    """Fit boosted trees, non-decreasing in every feature, and export them.

    The prior is non-decreasing too, so the product of prior and residual is. The sum is clipped to the
    range of `log_residual`.

    Parameters
    ----------
    matrix : ndarray, shape (n, k)
        Features of a layer kind.
    log_residual : ndarray, shape (n,)
        Natural logarithm of measured over prior time.
    weights : ndarray, shape (n,), optional
        Of the squared errors; equal by default.
    num_trees : int

    Raises
    ------
    CostModelError
        If there are fewer than :data:`MIN_TREE_ROWS` rows or a value is not finite.
    """
    if len(matrix) < MIN_TREE_ROWS or not (np.isfinite(matrix).all() and np.isfinite(log_residual).all()):
        raise CostModelError(
            f"residual trees must be fitted on {MIN_TREE_ROWS} or more finite rows, found {len(matrix)}. "
            "Use the prior alone or profile more sizes."
        )
    return _boost(matrix, log_residual, weights, num_trees)


def _boost(
    matrix: FloatArray, log_residual: FloatArray, weights: FloatArray | None, num_trees: int
) -> TreeEnsemble:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    regressor = HistGradientBoostingRegressor(
        max_iter=num_trees,
        learning_rate=_LEARNING_RATE,
        max_leaf_nodes=_MAX_LEAVES,
        max_depth=_MAX_DEPTH,
        min_samples_leaf=_MIN_LEAF_ROWS,
        monotonic_cst=[1] * matrix.shape[1],
        early_stopping=False,
        random_state=0,
    )
    # A profile has hundreds of rows: OpenMP threads would only wait for each other, many times longer
    # than the fit takes when ranks share the cores.
    with threadpool_limits(limits=1, user_api="openmp"):
        regressor.fit(matrix, log_residual, sample_weight=weights)
    return export_trees(regressor, float(log_residual.min()), float(log_residual.max()))


def trees_help(matrix: FloatArray, log_residual: FloatArray) -> bool:
    """Whether trees lower the mean error on rows that were left out of their fit (2 folds).

    Parameters
    ----------
    matrix, log_residual : ndarray
        As for :func:`fit_residual_trees`.
    """
    left_out = np.arange(len(matrix)) % 2 == 0
    error = 0.0
    for held in (left_out, ~left_out):
        trees = _boost(matrix[~held], log_residual[~held], None, _NUM_TREES)
        error += float(np.abs(log_residual[held] - trees.predict(matrix[held])).sum())
    return error < _GAIN * float(np.abs(log_residual).sum())


def export_trees(regressor: Any, low: float, high: float) -> TreeEnsemble:
    """Copy a fitted ``HistGradientBoostingRegressor`` of numeric features into plain arrays.

    scikit-learn has no public view of these trees; its ``_predictors`` and ``_baseline_prediction`` are
    read here and nowhere else.

    Parameters
    ----------
    regressor : HistGradientBoostingRegressor
        Fitted with the squared error.
    low, high : float
        Limits of the sum; infinite limits are not stored, so pass finite ones.
    """
    trees = [iteration[0].nodes for iteration in regressor._predictors]
    roots = np.cumsum([0] + [len(tree) for tree in trees[:-1]], dtype=np.int64)
    nodes = np.concatenate(trees)
    offset = np.repeat(roots, [len(tree) for tree in trees])
    itself = np.arange(len(nodes))
    leaf = nodes["is_leaf"].astype(np.bool_)
    return TreeEnsemble(
        num_features=int(regressor.n_features_in_),
        baseline=float(np.ravel(regressor._baseline_prediction)[0]),
        low=low,
        high=high,
        roots=roots,
        feature=np.where(leaf, 0, nodes["feature_idx"]).astype(np.int64),
        threshold=np.where(leaf, 0.0, nodes["num_threshold"]).astype(np.float64),
        left=np.where(leaf, itself, nodes["left"].astype(np.int64) + offset),
        right=np.where(leaf, itself, nodes["right"].astype(np.int64) + offset),
        value=nodes["value"].astype(np.float64),
        missing_left=nodes["missing_go_to_left"].astype(np.bool_),
    )
