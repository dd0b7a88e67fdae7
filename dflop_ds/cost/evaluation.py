"""How good predictions are: held-out errors per layer kind and per stage, beside the alternatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.alternatives import LayerPredictor, fit_predictors
from dflop_ds.cost.features import LAYER_KINDS, FloatArray, MicrobatchFeatures, ProfileRow
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.model import compose_stages
from dflop_ds.cost.quantiles import StageQuantiles, measured_stages, whole_microbatches
from dflop_ds.errors import CostModelError
from dflop_ds.flops import ModelDims

NUM_FOLDS = 5


@dataclasses.dataclass(frozen=True)
class ErrorSummary:
    """Errors of n predictions.

    Attributes
    ----------
    num : int
        Predictions compared; times of zero are left out.
    mape, p50, p95, largest : float
        Mean, median, 95th percentile and maximum of ``|predicted - measured| / measured``.
    bias : float
        Mean of ``(predicted - measured) / measured``.
    """

    num: int
    mape: float
    p50: float
    p95: float
    largest: float
    bias: float


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Predictions for measurements that were not learned from.

    Attributes
    ----------
    measured_s : dict of str to ndarray, shape (n,)
        Forward plus backward seconds by target: a layer kind, or ``stage 0`` and so on.
    predicted_s : dict of str to dict of str to ndarray, shape (n,)
        By predictor and target.
    p90_s : dict of str to ndarray, shape (n,)
        Upper quantile of the cost model by target.
    """

    measured_s: dict[str, FloatArray]
    predicted_s: dict[str, dict[str, FloatArray]]
    p90_s: dict[str, FloatArray]


def summarise_errors(predicted_s: FloatArray, measured_s: FloatArray) -> ErrorSummary:
    """Relative errors of predictions.

    Raises
    ------
    CostModelError
        If nothing positive was measured, or a number is not finite.
    """
    positive = measured_s > 0
    if not positive.any() or not (np.isfinite(predicted_s).all() and np.isfinite(measured_s).all()):
        raise CostModelError(
            f"errors must be taken of finite times, some of them positive, found {len(measured_s)} "
            f"measurements with {int(positive.sum())} positive ones. Profile more shapes."
        )
    relative = (predicted_s[positive] - measured_s[positive]) / measured_s[positive]
    size = np.abs(relative)
    return ErrorSummary(
        num=int(positive.sum()),
        mape=float(size.mean()),
        p50=float(np.median(size)),
        p95=float(np.quantile(size, 0.95)),
        largest=float(size.max()),
        bias=float(relative.mean()),
    )


def error_without_noise(predicted_s: FloatArray, runs_s: FloatArray) -> float:
    """Root mean square relative error of predictions, the noise of the measurements taken out.

    Errors against one run are multiplied by those against another run: what two runs do not share, their
    noise, cancels in the mean, and what they share, the error of the prediction, is squared. 0 means
    too small to be told from the noise.

    Parameters
    ----------
    predicted_s : ndarray, shape (n, ...)
        Positive.
    runs_s : ndarray, shape (num_runs, n, ...)
        The same work measured two or more times, positive.
    """
    errors = np.log(predicted_s / runs_s)
    num_runs = len(errors)
    products = (np.square(errors.sum(axis=0)) - np.square(errors).sum(axis=0)) / (num_runs * (num_runs - 1))
    return float(np.sqrt(max(0.0, products.mean())))


def coverage(upper_s: FloatArray, measured_s: FloatArray) -> float:
    """Share of the positive measurements that are at most `upper_s`, which may be one for several runs."""
    positive = measured_s > 0
    return float((measured_s <= upper_s)[positive].mean())


def cross_calibrated(
    quantiles: StageQuantiles,
    model: LayerCostModel,
    features: MicrobatchFeatures,
    runs_s: FloatArray,
    level: float,
) -> FloatArray:
    """Quantiles of stage times, those of each fold calibrated on the runs of the other folds.

    Parameters
    ----------
    quantiles : StageQuantiles
        Fitted on a profile that has none of the microbatches; not changed.
    model : LayerCostModel
        Fitted on the same profile.
    features : MicrobatchFeatures, n microbatches
        Number i belongs to fold ``i % 5``.
    runs_s : ndarray, shape (num_runs, n, num_stages)
        Forward plus backward seconds.
    level : float

    Returns
    -------
    ndarray, shape (n, num_stages)
    """
    upper_s = np.zeros(runs_s.shape[1:])
    fold_of = np.arange(len(features)) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        held, others = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of != fold)
        calibrated = StageQuantiles.from_dict(quantiles.to_dict())
        others_s = runs_s[:, others].reshape(-1, runs_s.shape[2])
        calibrated.calibrate(model, take(features, np.tile(others, len(runs_s))), others_s)
        upper_s[held] = calibrated.predict(model, take(features, held), level)
    return upper_s


def predict_stages(
    predictor: LayerPredictor, stages: Sequence[Sequence[str]], features: MicrobatchFeatures
) -> FloatArray:
    """Forward plus backward seconds of every stage, shape (n, num_stages)."""
    kinds = [kind for kind in LAYER_KINDS if any(kind in stage for stage in stages)]
    times_s = {kind: predictor.predict(kind, features) for kind in kinds}
    return np.add(*compose_stages(stages, times_s, len(features)))


def cross_validate(rows: Sequence[ProfileRow], dims: ModelDims, stages: Sequence[Sequence[str]]) -> HeldOut:
    """Errors on shapes that were held out, each once, in 5 folds.

    Only microbatches for which every layer kind was profiled are used, so that the time of a stage can
    be composed from measured layers.

    Parameters
    ----------
    rows : sequence of ProfileRow
    dims : ModelDims
    stages : sequence of sequences of str
        Layer kinds of each stage.

    Raises
    ------
    CostModelError
        If there are too few rows to leave a fold out.
    """
    groups = whole_microbatches(rows)
    targets = [[kind] for kind in LAYER_KINDS if any(row.kind == kind for row in rows)]
    names = [target[0] for target in targets] + [f"stage {number}" for number in range(len(stages))]
    targets += [list(stage) for stage in stages]
    features, measured_s = measured_stages(groups, targets)
    fold_of = np.arange(len(groups)) % NUM_FOLDS
    predicted: dict[str, FloatArray] = {}
    upper_s = np.zeros_like(measured_s)
    for fold in range(NUM_FOLDS):
        left_out = np.flatnonzero(fold_of == fold)
        kept = [row for index, group in enumerate(groups) if fold_of[index] != fold for row in group]
        held = take(features, left_out)
        predictors = fit_predictors(kept, dims)
        for name, predictor in predictors.items():
            column = predicted.setdefault(name, np.zeros_like(measured_s))
            column[left_out] = predict_stages(predictor, targets, held)
        quantiles = StageQuantiles().fit(kept, dims, targets, (0.9,))
        upper_s[left_out] = quantiles.predict(predictors["cost model"], held, 0.9)
    return HeldOut(
        measured_s=_columns(measured_s, names),
        predicted_s={name: _columns(matrix, names) for name, matrix in predicted.items()},
        p90_s=_columns(upper_s, names),
    )


def take(features: MicrobatchFeatures, rows: npt.ArrayLike) -> MicrobatchFeatures:
    """The given microbatches only."""
    return MicrobatchFeatures(*(column[np.asarray(rows)] for column in vars(features).values()))


def error_table(held_out: HeldOut) -> list[str]:
    """Lines of a table: one per target, the cost model first, then the error of each alternative."""
    names = list(held_out.predicted_s)
    head = ("predicted", "shapes", "MAPE", "p50", "p95", "max", "p90 holds", *names[1:])
    widest = max(15, *(len(target) + 2 for target in held_out.measured_s))
    widths = [widest, 8, 8, 8, 8, 8, 11, *(len(name) + 2 for name in names[1:])]
    lines = ["".join(f"{text:>{width}}" for text, width in zip(head, widths, strict=True))]
    for target, measured_s in held_out.measured_s.items():
        own = summarise_errors(held_out.predicted_s[names[0]][target], measured_s)
        others = [summarise_errors(held_out.predicted_s[name][target], measured_s).mape for name in names[1:]]
        shares = [own.mape, own.p50, own.p95, own.largest, coverage(held_out.p90_s[target], measured_s)]
        cells = [target, str(own.num), *(f"{share:.1%}" for share in (*shares, *others))]
        lines.append("".join(f"{text:>{width}}" for text, width in zip(cells, widths, strict=True)))
    return lines


def _columns(matrix: FloatArray, names: Sequence[str]) -> dict[str, FloatArray]:
    return {name: matrix[:, column] for column, name in enumerate(names)}
