"""The cost model: predicted seconds of pipeline stages and of single samples.

:class:`CostModel` adds the layers of a :class:`~dflop_ds.cost.layer_model.LayerCostModel` up to stages
and states what a sample contributes to the microbatch that it will share.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dflop_ds.cost.features import LAYER_KINDS, FloatArray, MicrobatchFeatures, ProfileRow, check_kind
from dflop_ds.cost.gradients import LayerTraining, backward_factor
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.errors import CostModelError
from dflop_ds.shapes import ShapeTable

__all__ = ("CostModel", "LayerCostModel", "ProfileRow", "SampleCosts")

SAMPLES_PER_BIN = 8.0


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
    training : sequence of sequences of LayerTraining, optional
        What is trained of each layer, shaped as `stages`; by default everything.
    activation_checkpointing : bool
        Whether the profiled backward passes contain a second forward pass.

    Raises
    ------
    CostModelError
        If there is no stage, or a kind is unknown.
    """

    def __init__(
        self,
        layer_model: LayerCostModel,
        stages: Sequence[Sequence[str]],
        training: Sequence[Sequence[LayerTraining]] | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        if not stages:
            raise CostModelError("a cost model must have at least one stage, found none. Pass their layers.")
        self.layer_model = layer_model
        self.stages = tuple(tuple(stage) for stage in stages)
        self.training = None if training is None else tuple(tuple(stage) for stage in training)
        self.activation_checkpointing = activation_checkpointing
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
        return self._stages(features, times_s)

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
        return SampleCosts(*self._stages(features, costs_s))

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

    def _stages(
        self, features: MicrobatchFeatures, times_s: Mapping[str, tuple[FloatArray, FloatArray]]
    ) -> tuple[FloatArray, FloatArray]:
        forward_s, backward_s = compose_stages(self.stages, times_s, len(features))
        if self.training is None:
            return forward_s, backward_s
        backward_s = np.zeros_like(forward_s)
        for index, (kinds, states) in enumerate(zip(self.stages, self.training, strict=True)):
            for (kind, state), count in Counter(zip(kinds, states, strict=True)).items():
                factor = backward_factor(
                    kind, features, self.layer_model.dims_, state, self.activation_checkpointing
                )
                backward_s[:, index] += count * factor * times_s[kind][1]
        return forward_s, backward_s

    def _kinds(self) -> list[str]:
        used = {kind for stage in self.stages for kind in stage}
        return [kind for kind in LAYER_KINDS if kind in used]


def compose_stages(
    stages: Sequence[Sequence[str]],
    layer_times_s: Mapping[str, tuple[FloatArray, FloatArray]],
    num_rows: int,
) -> tuple[FloatArray, FloatArray]:
    """Add the seconds of layers up to stages.

    Parameters
    ----------
    stages : sequence of sequences of str
        Layer kinds of each stage, one entry per layer.
    layer_times_s : dict of str to (ndarray, ndarray), each of shape (num_rows,)
        Forward and backward seconds of one layer of each kind.
    num_rows : int

    Returns
    -------
    forward_s, backward_s : ndarray, shape (num_rows, num_stages)
    """
    forward_s = np.zeros((num_rows, len(stages)))
    backward_s = np.zeros_like(forward_s)
    for kind, (kind_forward_s, kind_backward_s) in layer_times_s.items():
        counts = np.array([list(stage).count(kind) for stage in stages], dtype=np.float64)
        forward_s += kind_forward_s[:, np.newaxis] * counts
        backward_s += kind_backward_s[:, np.newaxis] * counts
    return forward_s, backward_s
