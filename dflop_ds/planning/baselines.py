"""What the same GPUs do without the data: splits by layer or parameter count, samples by position."""

from __future__ import annotations

from dflop_ds.planning.evaluation import Evaluation, Evaluator
from dflop_ds.planning.search import Search
from dflop_ds.planning.stages import SplitRule, StageTable, split_by_rule


def best_blind(
    found: Search, stages: StageTable, rule: SplitRule, limit_bytes: float, max_tensor: int
) -> Evaluation | None:
    """Fastest data-blind uniform layout that fits, of those that the search looked at.

    Parameters
    ----------
    found : Search
    stages : StageTable
    rule : {"parameters", "uniform"}
        How layers are cut into stages.
    limit_bytes : float
    max_tensor : int
        Largest tensor-parallel degree.

    Returns
    -------
    Evaluation or None
        None where no such layout fits.
    """
    evaluator = Evaluator(stages, blind=True)
    best: Evaluation | None = None
    for evaluation in found.ranking:
        layout = evaluation.layout
        if layout.encoder is not None or layout.llm.tensor > max_tensor:
            continue
        tried = evaluator.evaluate(layout, split_by_rule(stages, layout.llm.pipeline, rule))
        if tried.peak_bytes <= limit_bytes and (best is None or tried.step_s < best.step_s):
            best = tried
    return best


def gain_of_balancing(evaluation: Evaluation, stages: StageTable) -> float:
    """Share of the step that data-aware bins save, with the same layout and stages."""
    blind = Evaluator(stages, blind=True).evaluate(evaluation.layout, evaluation.sizes)
    return 1.0 - evaluation.step_s / blind.step_s
