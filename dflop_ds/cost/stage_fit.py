"""How slow ranks are and how far predictions of shape buckets are off, from measured microbatches.

A measured time is taken as ``slowness x sum over buckets (factor x predicted)``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray

_RIDGE = 0.02
_SIGNIFICANT = 3.5
_ROUNDS = 3
_MOST = 4.0


def fit_stage(
    predicted_s: FloatArray,
    measured_s: FloatArray,
    replica_of: npt.NDArray[np.int64],
    factors: FloatArray,
) -> tuple[dict[int, float], FloatArray]:
    """Ranks and buckets of one stage in turn: medians for the ranks, ridge regression for the buckets.

    Parameters
    ----------
    predicted_s : ndarray, shape (n, num_buckets)
        Uncorrected seconds of each microbatch, by bucket.
    measured_s : ndarray, shape (n,)
    replica_of : ndarray of int64, shape (n,)
        Which replica ran each microbatch.
    factors : ndarray, shape (num_buckets,)
        Where to start.

    Returns
    -------
    slowness : dict of int to float
        By replica, of those that ran a microbatch.
    factors : ndarray, shape (num_buckets,)
    """
    slowness: dict[int, float] = {}
    for _ in range(_ROUNDS):
        ratio = measured_s / (predicted_s @ factors)
        slowness = {int(r): float(np.median(ratio[replica_of == r])) for r in np.unique(replica_of)}
        slow = np.array([slowness[int(replica)] for replica in replica_of])
        factors = _bucket_factors(predicted_s * (slow / measured_s)[:, np.newaxis])
    return slowness, factors


def _bucket_factors(relative: FloatArray) -> FloatArray:
    """Factors f that bring ``relative @ f`` close to 1; exactly 1 where that is within the noise.

    Parameters
    ----------
    relative : ndarray, shape (n, num_buckets)
        Predicted part of each bucket over the measured time.
    """
    num_rows, num_buckets = relative.shape
    factors, errors = _ridge(relative, np.ones(num_rows))
    apart = np.abs(factors - 1.0) > _SIGNIFICANT * errors
    result: FloatArray = np.ones(num_buckets)
    if apart.any():
        known = relative[:, ~apart].sum(axis=1)
        result[apart] = _ridge(relative[:, apart], 1.0 - known)[0]
    return np.clip(result, 1.0 / _MOST, _MOST)


def _ridge(matrix: FloatArray, target: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least squares that stays close to 1 where little is known, and the standard errors."""
    num_rows, num_columns = matrix.shape
    weight = _RIDGE * num_rows / num_columns
    inverse = np.linalg.inv(matrix.T @ matrix + weight * np.eye(num_columns))
    solution: FloatArray = inverse @ (matrix.T @ target + weight)
    variance = float(np.square(target - matrix @ solution).sum()) / max(num_rows - num_columns, 1)
    errors: FloatArray = np.sqrt(variance * np.diag(inverse))
    return solution, errors
