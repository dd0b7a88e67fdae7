"""Exported trees against scikit-learn's own prediction."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from dflop_ds.cost.trees import MIN_TREE_ROWS, TreeEnsemble, export_trees, fit_residual_trees
from dflop_ds.errors import CostModelError


def rows(num_rows, num_features, seed=0):
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 200, (num_rows, num_features)).astype(float)
    target = np.log1p(matrix).sum(axis=1) * 0.1 + 0.05 * rng.normal(size=num_rows)
    return matrix, target


@pytest.mark.parametrize("num_features", [1, 2, 3])
@pytest.mark.parametrize("max_leaf_nodes", [4, 31])
def test_equals_sklearn(num_features, max_leaf_nodes):
    matrix, target = rows(400, num_features)
    regressor = HistGradientBoostingRegressor(
        max_iter=40, max_leaf_nodes=max_leaf_nodes, monotonic_cst=[1] * num_features, early_stopping=False
    ).fit(matrix, target)
    trees = export_trees(regressor, -100.0, 100.0)
    rng = np.random.default_rng(1)
    probe = rng.uniform(-50, 300, (1000, num_features))
    thresholds = np.resize(trees.threshold, (200, num_features))  # exactly on the thresholds
    probe = np.vstack([probe, thresholds, matrix])
    np.testing.assert_allclose(trees.predict(probe), regressor.predict(probe), rtol=0, atol=1e-12)


def test_missing_values_equal_sklearn():
    matrix, target = rows(300, 2)
    regressor = HistGradientBoostingRegressor(max_iter=20, early_stopping=False).fit(matrix, target)
    probe = matrix.copy()
    probe[::2, 0] = np.nan
    probe[::3, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = regressor.predict(probe)
    np.testing.assert_allclose(
        export_trees(regressor, -9.0, 9.0).predict(probe), expected, rtol=0, atol=1e-12
    )


def test_monotone_and_clipped():
    matrix, target = rows(200, 1)
    trees = fit_residual_trees(matrix, target)
    line = trees.predict(np.linspace(-1e3, 1e4, 5000)[:, np.newaxis])
    assert (np.diff(line) >= 0).all()
    assert target.min() <= line.min() and line.max() <= target.max()
    narrow = dataclasses.replace(trees, low=0.4, high=0.5)
    assert set(narrow.predict(np.array([[-1.0], [1e9]]))) == {0.4, 0.5}


def test_edge_value_is_held():
    matrix, target = rows(200, 2)
    trees = fit_residual_trees(matrix, target)
    edge = trees.predict(matrix.max(axis=0)[np.newaxis])
    np.testing.assert_array_equal(trees.predict(np.array([[1e9, 1e12]])), edge)


def test_json_round_trip_is_bit_identical():
    matrix, target = rows(200, 3)
    trees = fit_residual_trees(matrix, target)
    copy = TreeEnsemble.from_dict(json.loads(json.dumps(trees.to_dict(), allow_nan=False)))
    probe = np.random.default_rng(3).uniform(-10, 300, (500, 3))
    assert trees.predict(probe).tobytes() == copy.predict(probe).tobytes()


def test_a_row_does_not_depend_on_its_neighbours():
    matrix, target = rows(200, 3)
    trees = fit_residual_trees(matrix, target)
    together = trees.predict(matrix)
    alone = np.concatenate([trees.predict(matrix[i : i + 1]) for i in range(50)])
    assert together[:50].tobytes() == alone.tobytes()


def test_single_leaf_and_no_rows():
    matrix = np.ones((60, 1))
    trees = fit_residual_trees(matrix, np.full(60, 0.25))
    np.testing.assert_allclose(trees.predict(np.array([[1.0], [7.0]])), 0.25)
    assert trees.predict(np.zeros((0, 1))).shape == (0,)


def test_refusals():
    matrix, target = rows(MIN_TREE_ROWS - 1, 1)
    with pytest.raises(CostModelError, match="found 49"):
        fit_residual_trees(matrix, target)
    trees = fit_residual_trees(*rows(60, 2))
    with pytest.raises(CostModelError, match="2 features"):
        trees.predict(np.zeros((3, 1)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("left", lambda plain: [0] * len(plain["left"])),
        ("right", lambda plain: [10**6] * len(plain["right"])),
        ("feature", lambda plain: [5] * len(plain["feature"])),
        ("value", lambda plain: plain["value"][:-1]),
        ("value", lambda plain: ["x"] * len(plain["value"])),
        ("roots", lambda plain: [-1]),
        ("baseline", lambda plain: None),
        ("low", lambda plain: 1e9),
    ],
)
def test_damaged_trees_are_refused(name, change):
    plain = fit_residual_trees(*rows(100, 2)).to_dict()
    plain[name] = change(plain)
    with pytest.raises(CostModelError):
        TreeEnsemble.from_dict(plain)
