"""The private names of scikit-learn from which ``cost/trees.py`` reads fitted trees."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

NODE_FIELDS = {
    "is_leaf": "iu",
    "feature_idx": "iu",
    "num_threshold": "f",
    "left": "iu",
    "right": "iu",
    "value": "f",
    "missing_go_to_left": "iu",
}


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    matrix = rng.uniform(0.0, 100.0, (300, 3))
    return matrix, matrix[:, 0] + 0.1 * matrix[:, 1] ** 2 + rng.normal(size=300)


@pytest.fixture(scope="module")
def regressor(data) -> HistGradientBoostingRegressor:
    return HistGradientBoostingRegressor(
        max_iter=15,
        learning_rate=0.1,
        max_leaf_nodes=8,
        max_depth=3,
        min_samples_leaf=10,
        monotonic_cst=[1, 1, 1],
        early_stopping=False,
        random_state=0,
    ).fit(*data)


def test_one_predictor_per_iteration(regressor) -> None:
    assert [len(iteration) for iteration in regressor._predictors] == [1] * 15
    assert regressor.n_features_in_ == 3


def test_node_fields(regressor) -> None:
    for (predictor,) in regressor._predictors:
        fields = predictor.nodes.dtype.fields
        for name, kinds in NODE_FIELDS.items():
            assert fields[name][0].kind in kinds, name


def test_baseline_is_the_mean_of_the_targets(regressor, data) -> None:
    baseline = np.ravel(regressor._baseline_prediction)
    assert baseline.shape == (1,)
    assert baseline[0] == pytest.approx(data[1].mean())


def test_a_walk_along_the_nodes_gives_the_prediction(regressor, data) -> None:
    """Left if at most the threshold; the learning rate is already in the leaves."""
    for row in data[0][:40]:
        total = float(np.ravel(regressor._baseline_prediction)[0])
        for (predictor,) in regressor._predictors:
            node = predictor.nodes[0]
            while not node["is_leaf"]:
                left = row[node["feature_idx"]] <= node["num_threshold"]
                child = int(node["left"] if left else node["right"])
                assert child > 0, "children come after the root"
                node = predictor.nodes[child]
            total += float(node["value"])
        assert total == pytest.approx(regressor.predict(row[None])[0], rel=1e-12)
