"""Which sample goes to which rank and accumulation step: data-parallel training without a pipeline."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.exchange import refine
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.rank_runs import cut_into_runs
from dflop_ds.scheduling.rank_step import Bins, RankStep, blind_bins, place_bins
from dflop_ds.scheduling.solve import POLICIES, solve

_RUN_POWERS = (1.0, 4.0)
"""Cuts to start from: with least padding, and of nearly equal cost."""

_EVEN = 1e-3


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """Bins of one optimizer step and how good they are.

    Attributes
    ----------
    bins : tuple of tuple of int
        Positions in the global batch; bin ``rank * num_slots + slot``.
    predicted_s, blind_s : float or None
        Predicted seconds of the step, and of the data-blind bins; None without costs.
    imbalance : float or None
        Seconds of the busiest rank over those of the mean rank.
    padding_share : float
        Padding tokens over all computed tokens.
    planning_s : float
        Wall-clock seconds that the decision took.
    fallback_reason : str or None
        Why the data-blind bins were kept although others were asked for.
    """

    bins: Bins
    predicted_s: float | None
    blind_s: float | None
    imbalance: float | None
    padding_share: float
    planning_s: float
    fallback_reason: str | None = None


def plan_rank_bins(
    step: RankStep, cost: MicrobatchCost | None, *, policy: str = "lpt", deterministic_time_s: float = 0.1
) -> RankPlan:
    """Bins with the shortest predicted step.

    Starts from equal sums of costs (best for packed samples) and from runs of similar length (best for
    padded ones, :mod:`~dflop_ds.scheduling.rank_runs`), exchanges samples between bins, and keeps the
    data-blind bins where nothing is gained.
    Pure: the same step and costs give the same bins on every rank.

    Parameters
    ----------
    step : RankStep
    cost : MicrobatchCost or None
        None keeps the data-blind bins: nothing is known yet.
    policy : {"lpt", "cp_sat", "blind"}
    deterministic_time_s : float
        Effort of "cp_sat".

    Raises
    ------
    SchedulingError
        If the policy is unknown.
    """
    if policy not in POLICIES:
        raise SchedulingError(f"policy must be one of {POLICIES}, found {policy!r}. Choose one of them.")
    started_s = time.perf_counter()
    blind = blind_bins(step)
    if cost is None or policy == "blind" or step.num_samples < step.num_bins:
        return _finish(step, blind, blind, cost, started_s, None)
    starts, reason = _start_bins(step, cost, policy, deterministic_time_s)
    best = blind
    for bins in starts:
        if not _is_even(step, bins, cost):
            bins = refine(step, bins, cost)
        best = min(best, bins, key=lambda bins: (not _is_allowed(step, bins), step.predict_s(bins, cost)))
        if _is_even(step, best, cost):
            break
    return _finish(step, best, blind, cost, started_s, reason if best == blind else None)


def _start_bins(
    step: RankStep, cost: MicrobatchCost, policy: str, deterministic_time_s: float
) -> tuple[list[Bins], str | None]:
    groupings, reason = [], None
    try:
        solution = solve(_problem(step, cost), policy=policy, deterministic_time_s=deterministic_time_s)
        groupings.append([list(members) for members in solution.assignment.bins])
        reason = solution.fallback_reason
    except InfeasibleError as error:
        reason = str(error)
    cuts = [cut_into_runs(step, cost, power) for power in _RUN_POWERS]
    groupings += [[run.tolist() for run in runs] for runs in cuts if runs is not None]
    placed = []
    for groups in groupings:
        sizes = step.sizes(groups)
        bins = place_bins(step, groups, cost.phases_s(sizes).sum(axis=-1))
        if step.keeps_limits(sizes):
            placed.append(bins)
        else:
            reason = reason or "no bins within max_tokens and max_encoder_inputs were found"
    return placed, reason


def _problem(step: RankStep, cost: MicrobatchCost) -> Problem:
    """The packed step as a problem with one cost per sample; padding is left to the exchange."""
    limits = (
        ("tokens", step.llm_tokens, step.max_tokens),
        ("encoder inputs", step.encoder_inputs, step.max_encoder_inputs),
    )
    used = [(name, np.ceil(column).astype(np.int64), cap) for name, column, cap in limits if cap is not None]
    sizes = [column for _, column, _ in used]
    return Problem(
        costs_s=cost.sample_s(step.llm_tokens, step.encoder_inputs)[:, None],
        num_replicas=step.num_ranks,
        num_microbatches=step.num_slots,
        sizes=np.stack(sizes, axis=1) if sizes else np.zeros((step.num_samples, 0), dtype=np.int64),
        caps=np.array([cap for _, _, cap in used], dtype=np.int64),
        cap_names=tuple(name for name, _, _ in used),
    )


def _is_even(step: RankStep, bins: Bins, cost: MicrobatchCost) -> bool:
    """Whether next to nothing can be gained: packed bins have the same sum, however they are filled."""
    if step.padded:
        return False
    total_s = float(cost.phases_s(step.sizes(bins)).sum())
    return step.predict_s(bins, cost) * step.num_ranks <= (1.0 + _EVEN) * total_s


def _is_allowed(step: RankStep, bins: Bins) -> bool:
    return step.keeps_limits(step.sizes(bins))


def _finish(
    step: RankStep,
    bins: Bins,
    blind: Bins,
    cost: MicrobatchCost | None,
    started_s: float,
    reason: str | None,
) -> RankPlan:
    sizes = step.sizes(bins)
    predicted_s = blind_s = imbalance = None
    if cost is not None:
        predicted_s, blind_s = step.predict_s(bins, cost), step.predict_s(blind, cost)
        imbalance = _imbalance(step, sizes, cost)
    padding = 1.0 - float(step.llm_tokens.sum()) / max(1.0, float(sizes.tokens.sum()))
    planning_s = time.perf_counter() - started_s
    return RankPlan(bins, predicted_s, blind_s, imbalance, max(0.0, padding), planning_s, reason)


def _imbalance(step: RankStep, sizes: MicrobatchSizes, cost: MicrobatchCost) -> float:
    ranks_s = step.by_rank(cost.phases_s(sizes)).sum(axis=(1, 2))
    return float(ranks_s.max() / ranks_s.mean()) if ranks_s.any() else 1.0
