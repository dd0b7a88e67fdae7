"""Mean loss over a data set through the pipeline, between training steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils.data import DataLoader, Dataset

from dflop_ds.cost.model import SampleCosts
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import ConfigError
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.plan import StepPlan
from dflop_ds.scheduling.planner import StepPlanner


def evaluate(engine: PipelineEngine, dataset: ProbedDataset, *, max_batches: int | None = None) -> float:
    """Mean loss over the supervised tokens (or samples) of a probed data set; NaN if it has none.

    Every rank derives the same plans from the shapes, so beside the activations only a wish to stop is
    communicated. The number of microbatches may differ from training; its hard limits hold.

    Parameters
    ----------
    engine : DflopPipelineEngine
    dataset : ProbedDataset
        The same on all ranks.
    max_batches : int, optional

    Raises
    ------
    ConfigError
        If the engine has no training data to take its settings from, or the data set has no shapes.
    """
    if engine.data_plan is None:
        raise ConfigError("evaluate() needs an engine with training_data; pass it to initialize().")
    if not isinstance(dataset, ProbedDataset):
        raise ConfigError(
            f"evaluate() needs a ProbedDataset, found {type(dataset).__name__}; "
            "wrap your data set with its shapes: ProbedDataset(dataset, table)."
        )
    if max_batches is not None and max_batches < 1:
        raise ConfigError(
            f"max_batches must be at least 1, found {max_batches}; leave it out for all batches."
        )
    planner = _planner(engine.data_plan.planner, dataset)
    num_batches = planner.order.steps_per_epoch
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    replica = engine.grid.get_data_parallel_rank()
    view = dataset if engine.is_first_stage() else dataset.without_media()
    total, num_terms, stopping = 0.0, 0, engine.stopping
    for step in range(num_batches):
        if not stopping and engine.feed.agree_to_stop():
            break
        plan = planner.plan(step).plan
        batches = _microbatches(plan, replica, view, engine.collate_fn)
        loss = engine.eval_batch(batches, num_micro_batches=plan.num_microbatches)
        total += float(loss) * plan.num_terms
        num_terms += plan.num_terms
    return total / num_terms if num_terms else math.nan


def _planner(planner: StepPlanner, dataset: ProbedDataset) -> StepPlanner:
    """Planner over another data set: in file order, balanced by its sizes."""
    order = EpochOrder(len(dataset.rows), planner.order.batch_size, seed=0, shuffle=False, tail="partial")
    sizes = np.stack([dataset.table.llm_tokens, dataset.table.encoder_inputs], axis=1).astype(np.float64)
    return dataclasses.replace(
        planner,
        table=dataset.table,
        rows=dataset.rows,
        order=order,
        costs=SampleCosts(forward_s=sizes, backward_s=np.zeros_like(sizes)),
        policy="lpt",
        reorder=False,
    )


def _microbatches(
    plan: StepPlan, replica: int, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    bins = plan.replica_bins(replica)
    loader = DataLoader(dataset, batch_sampler=[list(members) for members in bins], collate_fn=collate_fn)
    for inputs, (targets, weights, tag) in itertools.islice(loader, len(bins)):
        yield inputs, (targets, weights * plan.loss_scale, tag)
