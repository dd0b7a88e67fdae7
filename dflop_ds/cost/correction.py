"""Adaptive correction: predictions follow what training measures, and stop costing when they are right.

A stage time of a microbatch is measured as ``speed x sum over buckets (factor x predicted)``: the slowness
of the rank that ran it, and how far the predictions of each shape bucket are off on that stage.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop_ds.cost.features import FloatArray
from dflop_ds.cost.files import check_schema
from dflop_ds.cost.shape_buckets import ShapeBuckets
from dflop_ds.cost.stage_fit import fit_stage
from dflop_ds.errors import CostModelError

SCHEMA_VERSION = 1

_KEPT_PER_RANK = 192
_DRIFT = 0.10
_NOISE = 0.03

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StageSample:
    """One measured microbatch on one rank.

    Attributes
    ----------
    replica, stage : int
        The rank that ran it.
    predicted_s : tuple of float
        Uncorrected prediction, forward plus backward, of the samples of each shape bucket.
    measured_s : float
        Forward plus backward seconds.
    """

    replica: int
    stage: int
    predicted_s: tuple[float, ...]
    measured_s: float


@dataclasses.dataclass(frozen=True)
class CorrectionSetting:
    """When corrections are learned.

    Attributes
    ----------
    window : int
        Steps over which the benefit is averaged.
    probe_every : int
        Steps between two looks at the measurements while tracking is off.
    drift : float
        Relative change of the median error that counts as drift.
    """

    window: int = 8
    probe_every: int = 4
    drift: float = _DRIFT


class AdaptiveCorrection:
    """Learns factors per (stage, shape bucket) and a slowness per rank from measured microbatches.

    Deterministic: the same calls give the same state. Bounded: the last 192 microbatches of each rank
    are kept. :meth:`state_dict` holds everything.

    Tracking turns itself off when, over a window of steps, the mean benefit is below the mean cost of
    tracking. The benefit of a step is the misprediction in seconds that the corrections take off, on the
    rank where it is most; corrections below 3 % are noise and not applied. While off, every few steps are
    still looked at, and a median error that moved by more than 10 % since tracking stopped turns it on
    again, with a warning.

    Parameters
    ----------
    num_stages, num_replicas, num_buckets : int
    setting : CorrectionSetting, optional
    """

    def __init__(
        self, num_stages: int, num_replicas: int, num_buckets: int, setting: CorrectionSetting | None = None
    ) -> None:
        if min(num_stages, num_replicas, num_buckets) < 1:
            raise CostModelError(
                "a correction must have at least one stage, replica and bucket, found "
                f"{num_stages}, {num_replicas} and {num_buckets}. Pass the sizes of the run."
            )
        self.setting = setting or CorrectionSetting()
        self.factors = np.ones((num_stages, num_buckets))
        self.slowness = np.ones((num_stages, num_replicas))
        self.tracking = True
        self.num_steps = 0
        self._kept: dict[tuple[int, int], collections.deque[StageSample]] = {
            (stage, replica): collections.deque(maxlen=_KEPT_PER_RANK)
            for stage in range(num_stages)
            for replica in range(num_replicas)
        }
        self._balance: collections.deque[float] = collections.deque(maxlen=self.setting.window)
        self._settled: FloatArray | None = None

    def wants(self, step: int) -> bool:
        """Whether the measurements of a step should be gathered; the same on every rank that knows it."""
        return self.tracking or step % self.setting.probe_every == 0

    def observe(self, samples: Sequence[StageSample], tracking_cost_s: float) -> None:
        """Learn from the measurements of one step.

        Parameters
        ----------
        samples : sequence of StageSample
            All microbatches of the step on all ranks, in a fixed order.
        tracking_cost_s : float
            Seconds that gathering and learning took, measured by the caller.

        Raises
        ------
        CostModelError
            If a time is negative, NaN or infinite, or a rank is unknown.
        """
        for sample in samples:
            self._check(sample)
        self.num_steps += 1
        if not samples:
            return
        for sample in samples:
            if sample.measured_s > 0 and sum(sample.predicted_s) > 0:
                self._kept[sample.stage, sample.replica].append(sample)
        if not self.tracking:
            self._look_for_drift(samples)
            return
        benefit_s = self._benefit_s(samples)
        for stage in range(len(self.factors)):
            self._fit_stage(stage)
        self._balance.append(benefit_s - tracking_cost_s)
        if len(self._balance) == self.setting.window and math.fsum(self._balance) < 0:
            self._turn_off(samples)

    def bucket_factors(self) -> FloatArray:
        """Factors that are large enough to be applied, 1 elsewhere, shape (num_stages, num_buckets)."""
        return _without_noise(self.factors)

    def relative_slowness(self) -> FloatArray:
        """Slowness relative to the median rank, where it is no noise, shape (num_stages, num_replicas)."""
        return _without_noise(self.slowness / np.median(self.slowness))

    def sample_factors(self, buckets: ShapeBuckets) -> FloatArray:
        """What to multiply the costs of every sample by, shape (num_samples, num_stages).

        A stage that is slow in every replica counts here; a slow replica counts in
        :meth:`replica_slowness`.
        """
        of_stage = self.relative_slowness().min(axis=1)
        factors: FloatArray = self.bucket_factors().T[buckets.of_sample] * of_stage
        return factors

    def replica_slowness(self) -> FloatArray:
        """Slowness of each replica relative to the fastest, by its slowest stage, shape (num_replicas,)."""
        relative = self.relative_slowness()
        slowest: FloatArray = (relative / relative.min(axis=1, keepdims=True)).max(axis=0)
        return slowest

    def corrected_s(self, sample: StageSample) -> float:
        """Corrected prediction of one microbatch on its rank, up to a scale common to all."""
        predicted_s = float(np.dot(self.bucket_factors()[sample.stage], sample.predicted_s))
        return predicted_s * float(self.relative_slowness()[sample.stage, sample.replica])

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers, lists and dicts for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "factors": self.factors.tolist(),
            "slowness": self.slowness.tolist(),
            "tracking": self.tracking,
            "num_steps": self.num_steps,
            "balance_s": list(self._balance),
            "settled": None if self._settled is None else _without_nan(self._settled),
            "samples": [dataclasses.astuple(s) for kept in self._kept.values() for s in kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        With another number of stages, replicas or buckets the state says nothing about this run: it is
        left alone, with a warning.

        Raises
        ------
        CostModelError
            If the state is damaged or of another schema.
        """
        check_schema(state, "correction state", SCHEMA_VERSION)
        try:
            factors = np.array(state["factors"], dtype=np.float64)
            slowness = np.array(state["slowness"], dtype=np.float64)
            settled = None if state["settled"] is None else np.array(state["settled"], dtype=np.float64)
            samples = [StageSample(r, s, tuple(p), m) for r, s, p, m in state["samples"]]
            tracking, num_steps = bool(state["tracking"]), int(state["num_steps"])
            balance_s = [float(value) for value in state["balance_s"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CostModelError(
                f"a correction state must be complete, found {error!r}. Start without it."
            ) from error
        if factors.shape != self.factors.shape or slowness.shape != self.slowness.shape:
            _logger.warning(
                "the saved correction is of %s stages x replicas, this run has %s; it is not used",
                slowness.shape,
                self.slowness.shape,
            )
            return
        learned = np.concatenate([factors.ravel(), slowness.ravel()])
        if not ((learned > 0) & np.isfinite(learned)).all():
            raise CostModelError(
                f"correction factors must be finite and positive, found {learned.min()} to {learned.max()}. "
                "Start without the state."
            )
        for sample in samples:
            self._check(sample)
        self.factors, self.slowness, self._settled = factors, slowness, settled
        self.tracking, self.num_steps = tracking, num_steps
        self._balance = collections.deque(balance_s, maxlen=self.setting.window)
        for kept in self._kept.values():
            kept.clear()
        for sample in samples:
            self._kept[sample.stage, sample.replica].append(sample)

    def _fit_stage(self, stage: int) -> None:
        kept = [sample for (of, _), samples in self._kept.items() if of == stage for sample in samples]
        if not kept:
            return
        slowness, self.factors[stage] = fit_stage(
            np.array([sample.predicted_s for sample in kept]),
            np.array([sample.measured_s for sample in kept]),
            np.array([sample.replica for sample in kept]),
            self.factors[stage],
        )
        for replica, slow in slowness.items():
            self.slowness[stage, replica] = slow

    def _benefit_s(self, samples: Sequence[StageSample]) -> float:
        """Seconds of misprediction that the corrections in use take off, on the rank where it is most.

        A scale common to all predictions changes no assignment: both sides are taken at their best scale.
        """
        measured_s = np.array([sample.measured_s for sample in samples])
        plain_s = np.array([sum(sample.predicted_s) for sample in samples])
        better_s = np.array([self.corrected_s(sample) for sample in samples])
        gain_s = _misprediction_s(plain_s, measured_s) - _misprediction_s(better_s, measured_s)
        ranks = np.array([sample.stage * self.slowness.shape[1] + sample.replica for sample in samples])
        return float(np.bincount(ranks, gain_s).max())

    def _turn_off(self, samples: Sequence[StageSample]) -> None:
        self.tracking = False
        self._settled = self._errors(samples)
        self._balance.clear()
        _logger.info(
            "step %d: predictions hold, tracking costs more than it gains and is turned off", self.num_steps
        )

    def _look_for_drift(self, samples: Sequence[StageSample]) -> None:
        errors = self._errors(samples)
        settled = np.zeros_like(errors) if self._settled is None else self._settled
        moved = float(np.nanmax(np.abs(errors - settled), initial=0.0))
        if moved > math.log1p(self.setting.drift):
            self.tracking = True
            self._balance.clear()
            for kept in self._kept.values():
                kept.clear()
            _logger.warning(
                "step %d: measured times moved by %.0f %% against the predictions (another data mix, or a "
                "throttled device); they are tracked again",
                self.num_steps,
                100 * math.expm1(moved),
            )

    def _errors(self, samples: Sequence[StageSample]) -> FloatArray:
        """Median logarithm of measured over corrected time by stage and replica; NaN where not measured."""
        errors = np.full(self.slowness.shape, np.nan)
        for stage, replica in self._kept:
            ratios = [
                math.log(sample.measured_s / self.corrected_s(sample))
                for sample in samples
                if (sample.stage, sample.replica) == (stage, replica)
                and sample.measured_s > 0
                and sum(sample.predicted_s) > 0
            ]
            if ratios:
                errors[stage, replica] = float(np.median(ratios))
        return errors

    def _check(self, sample: StageSample) -> None:
        stages, buckets = self.factors.shape
        times = (*sample.predicted_s, sample.measured_s)
        known = 0 <= sample.stage < stages and 0 <= sample.replica < self.slowness.shape[1]
        if not known or len(sample.predicted_s) != buckets or not all(0 <= t < math.inf for t in times):
            raise CostModelError(
                f"a measurement must be of a known rank with {buckets} predictions and finite times >= 0, "
                f"found {sample}. Check the telemetry."
            )


def _without_nan(matrix: FloatArray) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in matrix.tolist()]


def _without_noise(factors: FloatArray) -> FloatArray:
    return np.where(np.abs(np.log(factors)) < math.log1p(_NOISE), 1.0, factors)


def _misprediction_s(predicted_s: FloatArray, measured_s: FloatArray) -> FloatArray:
    """Absolute errors at the best common scale, shape (n,)."""
    total_s = float(predicted_s.sum())
    scale = float(measured_s.sum()) / total_s if total_s > 0 else 0.0
    return np.abs(measured_s - scale * predicted_s)
