"""One training run of the demo; started by the deepspeed launcher, see ``benchmarks/demo.py``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader, Dataset, Subset

import dflop_ds
from dflop_ds.config import DflopConfig, load_ds_config, parse_dflop
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.runtime.report import write_step_trace
from dflop_ds.runtime.setup import Setup
from dflop_ds.runtime.telemetry import StepRecord, Telemetry, gather_steps, summarise
from dflop_ds.scheduling.order import EpochOrder


def main() -> None:
    """Train ``--num_steps`` steps and let rank 0 write what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--pad", action="store_true", help="pad every microbatch to its longest sample")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    ds_config = load_ds_config(args.config)
    config = parse_dflop(ds_config)
    deepspeed.init_distributed(dist_backend="gloo")
    setup = dflop_ds.prepare(ds_config, config)
    setup.collate_fn.pad_to_longest = args.pad
    setup = dataclasses.replace(setup, dataset=decoded(setup, config, ds_config))
    engine, *_ = dflop_ds.initialize(
        model=setup.model,
        model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
        training_data=setup.dataset if config.enabled else None,
        collate_fn=setup.collate_fn,
        config=ds_config,
    )
    telemetry = engine.telemetry if config.enabled else Telemetry.attach(engine)
    if not config.enabled:
        engine.set_dataloader(RepeatingLoader(in_epoch_order(setup, config, ds_config)))
    result = run(engine, telemetry, config, Path(args.out, f"{args.label}.step{dist.get_rank()}"))
    gathered = gather_steps(telemetry)
    engine.telemetry = telemetry
    write_step_trace(engine, Path(args.out) / f"trace_{args.label}.json", None)
    if dist.get_rank() == 0:
        result |= (
            measured(gathered)
            | tokens(setup, config, ds_config, args.pad)
            | {"stages": [int(part) for part in setup.model.parts], "layer_kinds": setup.model.layer_kinds}
        )
        Path(args.out, f"{args.label}.json").write_text(json.dumps(result))
    engine.destroy()


class InMemory(Dataset[Any]):
    """Samples that were decoded beforehand."""

    def __init__(self, dataset: Dataset[Any], indices: list[int], num_samples: int) -> None:
        self.samples = {index: dataset[index] for index in indices}
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def without_pixels(self) -> InMemory:
        return self


def decoded(setup: Setup, config: DflopConfig, ds_config: dict[str, Any]) -> ProbedDataset:
    """The data set with all samples of the run decoded, so that the steps measure the pipeline.

    On two cores a decoding worker would take its time from the two stages. The first stage holds
    pixels, the last one labels only, in every run.
    """
    order = epoch_order(setup, config, ds_config)
    steps = range((config.train.num_steps or 0) + config.scheduler.lookahead + 1)
    used = sorted({int(setup.dataset.rows[p]) for s in steps for p in order.batch(s).positions})
    source = setup.dataset if setup.model.stage_id == 0 else setup.dataset.without_pixels()
    return ProbedDataset(InMemory(source, used, len(source)), setup.dataset.table, setup.dataset.rows)


def epoch_order(setup: Setup, config: DflopConfig, ds_config: dict[str, Any]) -> EpochOrder:
    """The order of global batches, which is the same in every run."""
    return EpochOrder(
        len(setup.dataset.table),
        ds_config["train_batch_size"],
        config.seed,
        config.data.shuffle,
        config.data.tail,
    )


def in_epoch_order(setup: Setup, config: DflopConfig, ds_config: dict[str, Any]) -> DataLoader[Any]:
    """Microbatches of the same global batches in data-blind order, for the stock engine."""
    order = epoch_order(setup, config, ds_config)
    steps = range(config.train.num_steps or 0)
    indices = [int(setup.dataset.rows[p]) for s in steps for p in order.batch(s).positions]
    size = ds_config["train_micro_batch_size_per_gpu"]
    return DataLoader(Subset(setup.dataset, indices), batch_size=size, collate_fn=setup.collate_fn)


def run(engine: Any, telemetry: Telemetry, config: DflopConfig, progress: Path) -> dict[str, Any]:
    """Losses and wall times of all steps, and what planning cost."""
    losses, times_s = [], []
    for step in range(config.train.num_steps or 0):
        progress.write_text(str(step))
        start_s = time.perf_counter()
        if config.enabled:
            loss = engine.train_batch()
        else:
            with telemetry.step():
                loss = engine.train_batch()
        times_s.append(time.perf_counter() - start_s)
        losses.append(float(loss))
    result: dict[str, Any] = {"losses": losses, "step_times_s": times_s}
    if config.enabled:
        solutions = (
            [engine.feed.history[step].solution for step in range(len(losses))]
            if dist.get_rank() == 0
            else []
        )
        result |= {
            "exposed_planning_s": engine.feed.stats.exposed_s,
            "background_planning_s": engine.feed.background_s,
            "num_fallbacks": engine.feed.num_fallbacks,
            "solvers": [solution.solver for solution in solutions],
            "ratio_to_bound": [solution.ratio_to_bound for solution in solutions],
        }
    return result


def tokens(setup: Setup, config: DflopConfig, ds_config: dict[str, Any], padded: bool) -> dict[str, Any]:
    """Useful LLM tokens of every step, and the share of all processed tokens that is padding."""
    order = epoch_order(setup, config, ds_config)
    lengths = [
        setup.dataset.table.llm_tokens[order.batch(s).positions] for s in range(config.train.num_steps or 0)
    ]
    useful = [int(step.sum()) for step in lengths]
    if not padded:
        return {"useful_tokens": useful, "padding_share": 0.0}
    size = ds_config["train_micro_batch_size_per_gpu"]
    processed = sum(int((step.reshape(-1, size).max(axis=1) * size).sum()) for step in lengths)
    return {"useful_tokens": useful, "padding_share": 1.0 - sum(useful) / processed}


def measured(gathered: dict[int, list[StepRecord]]) -> dict[str, Any]:
    """Per step: bubble fraction, microbatch imbalance, and the passes of the last step for the figure."""
    summaries = [
        summarise({rank: steps[index] for rank, steps in gathered.items()})
        for index in range(len(gathered[0]))
    ]
    last = {rank: steps[-1] for rank, steps in gathered.items()}
    origin_s = min(step.start_s for step in last.values())
    passes = [
        [rank, r.name, r.microbatch, step.start_s - origin_s + r.start_s, r.duration_s]
        for rank, step in last.items()
        for r in step.compute()
    ]
    return {
        "bubble_fractions": [summary.bubble_fraction for summary in summaries],
        "imbalances": [summary.stage_imbalance for summary in summaries],
        "busy_s": [summary.busy_s for summary in summaries],
        "passes": passes,
    }


if __name__ == "__main__":
    main()
