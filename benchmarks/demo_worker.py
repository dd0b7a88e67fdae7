"""The ranks of the demo; started by the deepspeed launcher, see ``benchmarks/demo.py``."""

from __future__ import annotations

import argparse
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
from dflop_ds.config import load_ds_config, parse_dflop
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.runtime.distributed import leave
from dflop_ds.runtime.report import write_step_trace
from dflop_ds.runtime.setup import Setup
from dflop_ds.runtime.shared_memory import forget_segment_names
from dflop_ds.runtime.telemetry import StepRecord, Telemetry, gather_steps, summarise
from dflop_ds.scheduling.order import EpochOrder


def main() -> None:
    """Train all runs step by step in turn and let rank 0 write what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--labels", nargs="+", required=True)
    parser.add_argument(
        "--padded", nargs="*", default=[], help="runs that pad microbatches to their longest sample"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo")
    samples: dict[int, Any] = {}
    runs = [Run(label, args.out, label in args.padded, samples) for label in args.labels]
    for step in range(runs[0].num_steps):
        # In turn, and each time another run first: the machine's moods hit all runs alike.
        for index in range(len(runs)):
            runs[(index + step) % len(runs)].step()
        if dist.get_rank() == 0:
            (args.out / "progress").write_text(str(step + 1))
    for run in runs:
        result = run.result()
        write_step_trace(run.engine, args.out / f"trace_{run.label}.json", None)
        if dist.get_rank() == 0:
            (args.out / f"{run.label}.json").write_text(json.dumps(result))
    for run in runs:
        run.engine.destroy()
    forget_segment_names()
    leave()


class Run:
    """One way of training.

    Parameters
    ----------
    label : str
    out : Path
        Holds ``config_<label>.json``.
    pad : bool
    samples : dict of int to LoadedSample
        Decoded samples, shared by all runs.
    """

    def __init__(self, label: str, out: Path, pad: bool, samples: dict[int, Any]) -> None:
        self.label = label
        ds_config = load_ds_config(out / f"config_{label}.json")
        self.config = parse_dflop(ds_config)
        self.batch_size = ds_config["train_batch_size"]
        self.micro_batch_size = ds_config["train_micro_batch_size_per_gpu"]
        self.pad = pad
        setup = dflop_ds.prepare(ds_config, self.config)
        self.table = setup.dataset.table
        setup.collate_fn.pad_to_longest = pad
        dataset = self._decoded(setup, samples)
        self.engine, *_ = dflop_ds.initialize(
            model=setup.model,
            model_parameters=[p for p in setup.model.parameters() if p.requires_grad],
            training_data=dataset if self.config.enabled else None,
            collate_fn=setup.collate_fn,
            config=ds_config,
        )
        if not self.config.enabled:
            self.engine.telemetry = Telemetry.attach(self.engine)
            self.engine.set_dataloader(RepeatingLoader(self._in_epoch_order(dataset, setup)))
        self.model = setup.model
        self.losses: list[float] = []
        self.step_times_s: list[float] = []

    @property
    def num_steps(self) -> int:
        """Optimizer steps, warm-up included."""
        return self.config.train.num_steps or 0

    @property
    def order(self) -> EpochOrder:
        """The order of global batches, which is the same in every run."""
        data = self.config.data
        return EpochOrder(len(self.table), self.batch_size, self.config.seed, data.shuffle, data.tail)

    def step(self) -> None:
        """One optimizer step."""
        dist.barrier()
        start_s = time.perf_counter()
        if self.config.enabled:
            loss = self.engine.train_batch()
        else:
            with self.engine.telemetry.step():
                loss = self.engine.train_batch()
        self.losses.append(float(loss))
        self.step_times_s.append(time.perf_counter() - start_s)

    def result(self) -> dict[str, Any]:
        """Everything that was measured; a collective call."""
        result = {
            "losses": self.losses,
            "step_times_s": self.step_times_s,
            "stages": [int(part) for part in self.model.parts],
            "layer_kinds": self.model.layer_kinds,
            **self._tokens(),
            **measured(gather_steps(self.engine.telemetry)),
        }
        if self.config.enabled:
            feed = self.engine.feed
            result |= {
                "exposed_planning_s": feed.stats.exposed_s,
                "background_planning_s": feed.background_s,
                "num_fallbacks": feed.num_fallbacks,
            }
        return result

    def _decoded(self, setup: Setup, samples: dict[int, Any]) -> ProbedDataset:
        """The data set with all its samples decoded, so that the steps measure the pipeline.

        On two cores a decoding worker would take its time from the two stages. The first stage
        holds pixels, the last one labels only, in every run.
        """
        probed = setup.dataset
        source = probed if setup.model.stage_id == 0 else probed.without_media()
        for index in probed.rows.tolist():
            if index not in samples:
                samples[index] = source[index]
        return ProbedDataset(InMemory(samples), probed.table, probed.rows)

    def _in_epoch_order(self, dataset: ProbedDataset, setup: Setup) -> DataLoader[Any]:
        """Microbatches of the same global batches in data-blind order, for the stock engine."""
        steps = range(self.num_steps)
        indices = [int(dataset.rows[p]) for s in steps for p in self.order.batch(s).positions]
        subset = Subset(dataset, indices)
        return DataLoader(subset, batch_size=self.micro_batch_size, collate_fn=setup.collate_fn)

    def _tokens(self) -> dict[str, Any]:
        """Useful LLM tokens of every step, and the share of all processed tokens that is padding."""
        lengths = [self.table.llm_tokens[self.order.batch(s).positions] for s in range(self.num_steps)]
        useful = [int(step.sum()) for step in lengths]
        if not self.pad:
            return {"useful_tokens": useful, "padding_share": 0.0}
        size = self.micro_batch_size
        processed = sum(int((step.reshape(-1, size).max(axis=1) * size).sum()) for step in lengths)
        return {"useful_tokens": useful, "padding_share": 1.0 - sum(useful) / processed}


class InMemory(Dataset[Any]):
    """Samples that were decoded beforehand."""

    def __init__(self, samples: dict[int, Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def measured(gathered: dict[int, list[StepRecord]]) -> dict[str, Any]:
    """Per step: bubble fraction, microbatch imbalance, and the passes for the figure."""
    summaries = [
        summarise({rank: steps[index] for rank, steps in gathered.items()})
        for index in range(len(gathered[0]))
    ]
    passes = []
    for index in range(len(summaries)):
        ranks = {rank: steps[index] for rank, steps in gathered.items()}
        origin_s = min(step.start_s for step in ranks.values())
        passes.append(
            [
                [rank, r.name, r.microbatch, step.start_s - origin_s + r.start_s, r.duration_s]
                for rank, step in ranks.items()
                for r in step.compute()
            ]
        )
    return {
        "bubble_fractions": [summary.bubble_fraction for summary in summaries],
        "imbalances": [summary.stage_imbalance for summary in summaries],
        "busy_s": [summary.busy_s for summary in summaries],
        "passes": passes,
    }


if __name__ == "__main__":
    main()
