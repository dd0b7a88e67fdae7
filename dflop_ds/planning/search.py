"""The search: score all layouts, simulate the best, keep the fastest that fits.

Pruning keeps the argmin. A layout is left out unsimulated only if

- a lower bound of its memory exceeds the limit, so that it cannot fit, or
- a lower bound of its step time is no less than a step that was already simulated, so that it cannot win.

Only the budget of simulations can end the search earlier; `Search.proven` states whether it did not.
Layouts are simulated in the order of their estimates, those last that probably do not fit; then the
neighbours of the best one, which have the same degrees and the next smaller or larger number of
microbatches, until none is better. Stages are cut by time; last, the best layout is also simulated with
DeepSpeed's own cuts, which can be faster where transfers weigh more than balance.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from dflop_ds.planning.candidates import Candidates, enumerate_layouts
from dflop_ds.planning.evaluation import Evaluation, Evaluator
from dflop_ds.planning.layout import Layout, SearchSpace
from dflop_ds.planning.scoring import Scorer, Scores
from dflop_ds.planning.stages import SPLIT_RULES, StageTable, split_by_rule
from dflop_ds.planning.workload import Workload

DEFAULT_SIMULATIONS = 20
_SAFETY = 1.0 - 1e-9
"""Bounds are compared with simulated times up to rounding."""


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """What was found.

    Attributes
    ----------
    ranking : list of Evaluation
        Simulated layouts that fit, fastest first; of equally fast ones the one with less memory first.
    too_large : Evaluation or None
        Of the simulated layouts that do not fit, the one that needs least memory.
    least_bytes : float
        Bytes per GPU below which no layout of the space can fit, by its lower bounds.
    num_candidates, num_simulated : int
    proven : bool
        No layout that was left out can be faster than the first of the ranking.
    bound_s : float
        Lower bound of the step time of every layout that was left out and may fit; infinite if none was.
    scoring_s, simulation_s : float
        Wall-clock seconds.
    """

    ranking: list[Evaluation]
    too_large: Evaluation | None
    least_bytes: float
    num_candidates: int
    num_simulated: int
    proven: bool
    bound_s: float
    scoring_s: float
    simulation_s: float

    @property
    def best(self) -> Evaluation | None:
        """Fastest layout that fits."""
        return self.ranking[0] if self.ranking else None


def search(
    workload: Workload,
    space: SearchSpace,
    *,
    limit_bytes: float,
    max_simulations: int = DEFAULT_SIMULATIONS,
    num_ranked: int = 1,
    evaluator: Evaluator | None = None,
) -> Search:
    """Find the layout with the least expected step time.

    Parameters
    ----------
    workload : Workload
    space : SearchSpace
    limit_bytes : float
        Memory of one GPU that a stage may use.
    max_simulations : int
        Layouts that are scheduled and simulated, more only until one fits; 0: as many as it takes to prove
        the best one.
    num_ranked : int
        So many layouts are simulated even if a bound shows that they cannot win, for the ranking.
    evaluator : Evaluator, optional
        By default a data-aware one.

    Raises
    ------
    ConfigError
        If no layout uses all GPUs and divides the batch.
    """
    start_s = time.perf_counter()
    evaluator = Evaluator(StageTable(workload)) if evaluator is None else evaluator
    candidates = enumerate_layouts(evaluator.stages, space)
    scores = Scorer(evaluator.stages).scores(candidates)
    scored_s = time.perf_counter()
    run = _Run(candidates, scores, evaluator, limit_bytes, num_ranked)
    run.simulate_in_order(max_simulations)
    while run.simulate_neighbours():
        pass
    run.ranking.sort(key=lambda found: (found.step_s, found.peak_bytes))
    run.recut_best()
    open_s = scores.bound_s[np.flatnonzero(run.is_open)]
    bound_s = float(open_s.min()) if open_s.size else np.inf
    return Search(
        ranking=run.ranking,
        too_large=run.too_large,
        least_bytes=float(scores.least_bytes.min()),
        num_candidates=len(candidates),
        num_simulated=len(run.schedules),
        proven=bound_s * _SAFETY > run.best_s or not open_s.size,
        bound_s=bound_s,
        scoring_s=scored_s - start_s,
        simulation_s=time.perf_counter() - scored_s,
    )


class _Run:
    """State of one search."""

    def __init__(
        self,
        candidates: Candidates,
        scores: Scores,
        evaluator: Evaluator,
        limit_bytes: float,
        num_ranked: int,
    ) -> None:
        self.num_ranked = num_ranked
        self.candidates, self.scores = candidates, scores
        self.evaluator, self.limit_bytes = evaluator, limit_bytes
        self.ranking: list[Evaluation] = []
        self.too_large: Evaluation | None = None
        self.best_s, self.best_index = np.inf, -1
        self.schedules: set[Layout] = set()
        # Neither simulated nor known not to fit.
        self.is_open = scores.least_bytes * _SAFETY <= limit_bytes

    def simulate_in_order(self, max_simulations: int) -> None:
        """Simulate by estimate, until the budget is used and something fits."""
        order = np.flatnonzero(self.is_open)
        tight = self.scores.expected_bytes[order] > self.limit_bytes
        for index in order[np.lexsort((self.scores.estimate_s[order], tight))].tolist():
            spent = max_simulations and self.ranking and len(self.schedules) >= max_simulations
            # ZeRO stages share a schedule, and the simulation of the second one costs next to nothing.
            if not spent or self._schedule(index) in self.schedules:
                self.simulate(index)

    def simulate_neighbours(self) -> bool:
        """Simulate the neighbours of the best layout; whether one of them is better."""
        before = self.best_index
        if before < 0:
            return False
        same = (self.candidates.llm == self.candidates.llm[before]).all(axis=1)
        same &= (self.candidates.encoder == self.candidates.encoder[before]).all(axis=1)
        counts = np.unique(self.candidates.num_microbatches[same])
        place = int(np.searchsorted(counts, self.candidates.num_microbatches[before]))
        near = np.isin(self.candidates.num_microbatches, counts[max(0, place - 1) : place + 2])
        for index in np.flatnonzero(same & near & self.is_open).tolist():
            self.simulate(index)
        return self.best_index != before

    def recut_best(self) -> None:
        """Take one of DeepSpeed's cuts for the first of the ranking, if it fits and is faster."""
        if not self.ranking or self.ranking[0].layout.encoder is not None:
            return
        layout = self.ranking[0].layout
        for rule in SPLIT_RULES:
            sizes = split_by_rule(self.evaluator.stages, layout.llm.pipeline, rule)
            if sizes == self.ranking[0].sizes:
                continue
            tried = self.evaluator.evaluate(layout, sizes)
            if tried.peak_bytes <= self.limit_bytes and tried.step_s < self.ranking[0].step_s:
                self.ranking[0] = tried

    def simulate(self, index: int) -> None:
        """Simulate a layout, unless it cannot beat the best one and enough are ranked."""
        if len(self.ranking) >= self.num_ranked and self.scores.bound_s[index] * _SAFETY > self.best_s:
            return
        self.schedules.add(self._schedule(index))
        self.is_open[index] = False
        found = self.evaluator.evaluate(self.candidates.layout(index))
        if found.peak_bytes > self.limit_bytes:
            if self.too_large is None or found.peak_bytes < self.too_large.peak_bytes:
                self.too_large = found
            return
        self.ranking.append(found)
        if found.step_s < self.best_s:
            self.best_s, self.best_index = found.step_s, index

    def _schedule(self, index: int) -> Layout:
        return dataclasses.replace(self.candidates.layout(index), zero_stage=0)
