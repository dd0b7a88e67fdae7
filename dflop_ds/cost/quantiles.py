"""Upper and middle quantiles of stage times, so that a plan can ask for a time that is seldom exceeded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop_ds.cost.features import LAYER_KINDS, FloatArray, MicrobatchFeatures, ProfileRow, check_rows
from dflop_ds.cost.files import check_schema
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.model import compose_stages
from dflop_ds.cost.trees import MIN_TREE_ROWS, TreeEnsemble, fit_residual_trees
from dflop_ds.errors import CostModelError
from dflop_ds.flops import ModelDims

SCHEMA_VERSION = 1
LEVELS = (0.5, 0.9)

_FOLDS = 4
_FEWEST_CALIBRATED = 10
_ROUNDS = 3
_NUM_TREES = 20
_SIZES = ("encoder_inputs", "llm_tokens", "sum_squared_tokens", "num_segments", "target_tokens")

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Spread:
    """Logarithm of quantile over predicted time: trees plus a constant; the constant alone without trees."""

    shift: float
    trees: TreeEnsemble | None


class StageQuantiles:
    """Quantiles of the time of stages (or of single layers), by trees over the sizes of a microbatch.

    The quantile is the predicted time times the exponential of boosted trees, fitted on the errors that
    the cost model makes on shapes it has not seen (4 folds of the profile). The trees are non-decreasing
    in every size and fitted with asymmetric weights; a constant shift then makes the wanted share of the
    held-out errors lie below (split conformal calibration). Below 50 shapes the shift is used alone.

    Attributes
    ----------
    stages_ : tuple of tuple of str
    spreads_ : dict of (int, float) to _Spread
        By stage and level.
    """

    stages_: tuple[tuple[str, ...], ...]
    spreads_: dict[tuple[int, float], _Spread]

    def fit(
        self,
        rows: Sequence[ProfileRow],
        dims: ModelDims,
        stages: Sequence[Sequence[str]],
        levels: Sequence[float] = LEVELS,
    ) -> StageQuantiles:
        """Fit from profile rows; stage times are composed from the rows of one microbatch.

        Parameters
        ----------
        rows : sequence of ProfileRow
        dims : ModelDims
        stages : sequence of sequences of str
            Layer kinds of each stage, one entry per layer.
        levels : sequence of float
            Between 0 and 1.

        Raises
        ------
        CostModelError
            If a level is not between 0 and 1, or there are too few whole microbatches.
        """
        if not all(0.0 < level < 1.0 for level in levels):
            raise CostModelError(
                f"quantile levels must lie between 0 and 1, found {list(levels)}. Use 0.5 and 0.9."
            )
        groups = whole_microbatches(rows)
        features, measured_s = measured_stages(groups, stages)
        predicted_s = _out_of_fold(groups, dims, stages, features)
        matrix = _matrix(features)
        self.stages_, self.spreads_ = tuple(tuple(stage) for stage in stages), {}
        for stage in range(len(stages)):
            usable = (measured_s[:, stage] > 0) & (predicted_s[:, stage] > 0)
            errors = np.log(measured_s[usable, stage] / predicted_s[usable, stage])
            for level in levels:
                self.spreads_[stage, float(level)] = _fit_spread(matrix[usable], errors, level)
        return self

    def predict(self, model: Any, features: MicrobatchFeatures, level: float = 0.9) -> FloatArray:
        """Seconds, forward plus backward, that a share `level` of the measurements stay below.

        Parameters
        ----------
        model : LayerCostModel
            Fitted on the same rows.
        features : MicrobatchFeatures, n microbatches
        level : float
            One of the fitted levels.

        Returns
        -------
        ndarray, shape (n, num_stages)
            Finite, not negative, non-decreasing in every size.
        """
        kinds = [kind for kind in LAYER_KINDS if any(kind in stage for stage in self.stages_)]
        times_s = {kind: model.predict(kind, features) for kind in kinds}
        result: FloatArray = np.add(*compose_stages(self.stages_, times_s, len(features)))
        matrix = _matrix(features)
        for stage in range(len(self.stages_)):
            spread = self.spreads_.get((stage, level))
            if spread is None:
                fitted = sorted({known for _, known in self.spreads_})
                raise CostModelError(
                    f"level must be one of the fitted {fitted}, found {level}. Fit this level."
                )
            log_factor = spread.shift + (0.0 if spread.trees is None else spread.trees.predict(matrix))
            result[:, stage] *= np.exp(log_factor)
        return result

    def calibrate(self, model: Any, features: MicrobatchFeatures, measured_s: FloatArray) -> StageQuantiles:
        """Shift the quantiles to stage times that were measured as a whole.

        The sum of separately measured layers is noisier than a stage run in one piece, so quantiles from
        a profile alone are too wide. The stages share the shift, so that few measurements suffice.

        Parameters
        ----------
        model : LayerCostModel
            Fitted on the same rows.
        features : MicrobatchFeatures, n microbatches
            Other ones than those of the profile.
        measured_s : ndarray, shape (n, num_stages)
            Forward plus backward seconds.

        Raises
        ------
        CostModelError
            If there are fewer than 10 microbatches.
        """
        if len(features) < _FEWEST_CALIBRATED:
            raise CostModelError(
                f"quantiles must be calibrated on at least {_FEWEST_CALIBRATED} microbatches, found "
                f"{len(features)}. Measure more."
            )
        for level in sorted({level for _, level in self.spreads_}):
            predicted_s = self.predict(model, features, level)
            positive = (measured_s > 0) & (predicted_s > 0)
            shift = _upper(np.log(measured_s[positive] / predicted_s[positive]), level)
            for stage in range(len(self.stages_)):
                spread = self.spreads_[stage, level]
                self.spreads_[stage, level] = dataclasses.replace(spread, shift=spread.shift + shift)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts for JSON."""
        spreads = [
            {
                "stage": stage,
                "level": level,
                "shift": spread.shift,
                "trees": None if spread.trees is None else spread.trees.to_dict(),
            }
            for (stage, level), spread in self.spreads_.items()
        ]
        stages = [list(stage) for stage in self.stages_]
        return {"schema_version": SCHEMA_VERSION, "stages": stages, "spreads": spreads}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> StageQuantiles:
        """Read what :meth:`to_dict` wrote; :class:`CostModelError` if it is damaged or of another schema."""
        check_schema(content, "quantile model", SCHEMA_VERSION)
        model = cls()
        try:
            model.stages_ = tuple(tuple(str(kind) for kind in stage) for stage in content["stages"])
            model.spreads_ = {}
            for stored in content["spreads"]:
                trees = None if stored["trees"] is None else TreeEnsemble.from_dict(stored["trees"])
                key = int(stored["stage"]), float(stored["level"])
                model.spreads_[key] = _Spread(float(stored["shift"]), trees)
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(
                f"a quantile model must be complete, found {error!r}. Fit it again."
            ) from error
        return model


def whole_microbatches(rows: Sequence[ProfileRow]) -> list[list[ProfileRow]]:
    """Rows of one microbatch together, of those microbatches for which every layer kind was profiled.

    An encoder kind is not profiled on a microbatch without encoder inputs, and not missed there.
    """
    check_rows(rows)
    groups: dict[tuple[int, ...], dict[str, ProfileRow]] = {}
    for row in rows:
        sizes = (
            row.encoder_inputs,
            row.media_tokens,
            row.llm_tokens,
            row.sum_squared_tokens,
            row.num_segments,
            row.target_tokens,
            row.sum_squared_windows,
            row.sum_squared_frames,
        )
        groups.setdefault(sizes, {})[row.kind] = row
    present = {row.kind for row in rows}
    whole = []
    for group in groups.values():
        features = MicrobatchFeatures.from_rows(list(group.values())[:1])
        if all(kind in group for kind in present if features.work_mask(kind)[0]):
            whole.append(list(group.values()))
    if len(whole) < 2 * _FOLDS:
        raise CostModelError(
            f"held-out errors must be taken on at least {2 * _FOLDS} microbatches with every layer kind, "
            f"found {len(whole)}. Profile for longer: `dflop-ds profile model` with a larger --budget-s."
        )
    return whole


def measured_stages(
    groups: Sequence[Sequence[ProfileRow]], stages: Sequence[Sequence[str]]
) -> tuple[MicrobatchFeatures, FloatArray]:
    """Sizes of microbatches and their stage times, added up from measured layers, shape (n, num_stages)."""
    features = MicrobatchFeatures.from_rows([group[0] for group in groups])
    total_s = np.zeros((len(groups), len(stages)))
    for index, group in enumerate(groups):
        layer_s = {row.kind: row.forward_s + row.backward_s for row in group}
        total_s[index] = [sum(layer_s.get(kind, 0.0) for kind in stage) for stage in stages]
    return features, total_s


def _out_of_fold(
    groups: Sequence[Sequence[ProfileRow]],
    dims: ModelDims,
    stages: Sequence[Sequence[str]],
    features: MicrobatchFeatures,
) -> FloatArray:
    """Stage times predicted by models that have not seen the microbatch, shape (n, num_stages)."""
    kinds = [kind for kind in LAYER_KINDS if any(kind in stage for stage in stages)]
    fold_of = np.arange(len(groups)) % _FOLDS
    predicted_s = np.zeros((len(groups), len(stages)))
    for fold in range(_FOLDS):
        kept = [row for index, group in enumerate(groups) if fold_of[index] != fold for row in group]
        model = LayerCostModel(warn=False).fit(kept, dims)
        held = fold_of == fold
        left_out = MicrobatchFeatures(*(column[held] for column in vars(features).values()))
        times_s = {kind: model.predict(kind, left_out) for kind in kinds}
        predicted_s[held] = np.add(*compose_stages(stages, times_s, len(left_out)))
    return predicted_s


def _fit_spread(matrix: FloatArray, errors: FloatArray, level: float) -> _Spread:
    if len(errors) < 2 * MIN_TREE_ROWS:
        return _Spread(_upper(errors, level), None)
    # Half of the errors shape the trees, the other half calibrates them.
    shaping = np.arange(len(errors)) % 2 == 0
    trees = _fit_asymmetric(matrix[shaping], errors[shaping], level)
    return _Spread(_upper(errors[~shaping] - trees.predict(matrix[~shaping]), level), trees)


def _fit_asymmetric(matrix: FloatArray, errors: FloatArray, level: float) -> TreeEnsemble:
    """Trees at about the wanted level: errors above the trees weigh `level`, those below the rest."""
    above = errors > np.quantile(errors, level)
    for _ in range(_ROUNDS):
        weights = np.where(above, level, 1.0 - level)
        trees = fit_residual_trees(matrix, errors, weights, num_trees=_NUM_TREES)
        above = errors > trees.predict(matrix)
    return trees


def _upper(errors: FloatArray, level: float) -> float:
    """Quantile with the small-sample correction of conformal prediction: ceil((n + 1) level) of n."""
    rank = min(len(errors), int(np.ceil((len(errors) + 1) * level)))
    return float(np.sort(errors)[rank - 1])


def _matrix(features: MicrobatchFeatures) -> FloatArray:
    return np.column_stack([getattr(features, name) for name in _SIZES])
