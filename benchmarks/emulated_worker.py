"""The ranks of the emulated cluster; started by the deepspeed launcher, see ``emulated_cluster.py``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.utils import RepeatingLoader

import dflop_ds
from benchmarks.emulated_times import LAYERS, EmulatedModel, EmulatedTimes
from dflop_ds import flops
from dflop_ds.data.layout import PackedLayout, bin_tag
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.models.layers import LayerPlan, PipelineLayer
from dflop_ds.runtime.distributed import leave
from dflop_ds.runtime.module import DflopPipelineModule
from dflop_ds.runtime.shared_memory import forget_segment_names
from dflop_ds.runtime.telemetry import Telemetry
from dflop_ds.shapes import ShapeTable

_WIDTH = 8


def main() -> None:
    """Run all engines step by step in turn; every rank writes what it measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo")
    job = json.loads((args.out / "job.json").read_text())
    table = ShapeTable.load(args.out / "shapes.npz")
    model = EmulatedModel.of(table, EmulatedTimes(job["flops_per_s"]))
    runs = [Run(each, table, model) for each in job["runs"]]
    for step in range(job["num_steps"]):
        # In turn, and each time another run first: the machine's moods hit all runs alike.
        for index in range(len(runs)):
            runs[(index + step) % len(runs)].step()
        if dist.get_rank() == 0:
            (args.out / "progress").write_text(str(step + 1))
    content = {run.label: run.result() for run in runs}
    (args.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(content))
    dist.barrier()
    for run in runs:
        run.engine.destroy()
    forget_segment_names()
    leave()


class Run:
    """One engine of the job.

    Parameters
    ----------
    job : dict
        "label", "num_stages", DeepSpeed's "config" and, for the stock engine, the bins of every step.
    table : ShapeTable
    model : EmulatedModel
    """

    def __init__(self, job: dict[str, Any], table: ShapeTable, model: EmulatedModel) -> None:
        self.label = job["label"]
        self.aware = job["config"]["dflop"]["enabled"]
        boundaries = model.boundaries(job["num_stages"])
        plans = [emulated_plan(index, model.layer_s[:, index]) for index in range(len(LAYERS))]
        module = DflopPipelineModule(plans, num_stages=job["num_stages"], boundaries=boundaries)
        module.layer_model = model.times
        local = module.local_layers()
        local[0].opens_forward = local[-1].opens_backward = True
        self.engine, *_ = dflop_ds.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            training_data=ProbedDataset(range(len(table)), table) if self.aware else None,
            collate_fn=collate,
            config=job["config"],
        )
        self.step_times_s: list[float] = []
        self.telemetry = self.engine.telemetry if self.aware else Telemetry.attach(self.engine)
        if not self.aware:
            replica = self.engine.grid.get_data_parallel_rank()
            own = [collate(members) for step in job["bins"] for members in step[replica]]
            self.engine.set_dataloader(RepeatingLoader(own))

    def step(self) -> None:
        """One optimizer step."""
        dist.barrier()
        start_s = time.perf_counter()
        if self.aware:
            self.engine.train_batch()
        else:
            with self.telemetry.step():
                self.engine.train_batch()
        self.step_times_s.append(time.perf_counter() - start_s)

    def result(self) -> dict[str, Any]:
        """Everything that this rank measured."""
        return {
            "stage": self.engine.stage_id,
            "replica": self.engine.grid.get_data_parallel_rank(),
            "step_times_s": self.step_times_s,
            "steps": [dataclasses.asdict(step) for step in self.telemetry.steps],
        }


class Device:
    """The emulated device of this rank: the waits of one pass follow one another without gaps.

    As on a GPU, which works through its queue while Python prepares what comes next.
    """

    def __init__(self) -> None:
        self._free_s = 0.0

    def wait(self, seconds: float, *, opens: bool) -> None:
        """Wait for so long after the layer before; after now, if this layer opens a pass."""
        if opens:
            self._free_s = time.perf_counter()
        self._free_s += seconds
        time.sleep(max(0.0, self._free_s - time.perf_counter()))


DEVICE = Device()


class EmulatedLayer(PipelineLayer):
    """A layer that waits, forward and backward, for the time of the samples of its microbatch.

    Parameters
    ----------
    index : int
        Position in the model; the last layer returns logits.
    sample_s : ndarray, shape (num_samples,)
        Forward seconds of every sample.

    Attributes
    ----------
    opens_forward, opens_backward : bool
        Whether it is the first layer of its stage that runs forward, and backward.
    """

    opens_forward = False
    opens_backward = False

    def __init__(self, index: int, sample_s: np.ndarray) -> None:
        super().__init__()
        self.kind, self.last, self.sample_s = LAYERS[index], index == len(LAYERS) - 1, sample_s
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, carry: Any) -> Any:
        hidden, layout = carry
        # The "tokens" of the layout are the samples of the microbatch.
        samples = PackedLayout.decode(layout).input_ids
        forward_s = float(self.sample_s[samples.numpy()].sum())
        hidden = _Wait.apply(hidden * self.weight, self, forward_s)
        return hidden.expand(len(samples), _WIDTH) if self.last else (hidden, layout)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: EmulatedLayer, forward_s: float) -> torch.Tensor:
        ctx.opens, ctx.backward_s = layer.opens_backward, flops.BACKWARD_RATIO * forward_s
        DEVICE.wait(forward_s, opens=layer.opens_forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        DEVICE.wait(ctx.backward_s, opens=ctx.opens)
        return gradient, None, None


def emulated_plan(index: int, sample_s: np.ndarray) -> LayerPlan:
    """How to build one emulated layer."""
    return LayerPlan(LAYERS[index], lambda: EmulatedLayer(index, sample_s))


def collate(members: Sequence[int]) -> Any:
    """A microbatch that names its samples and is tiny otherwise; one supervised token per sample."""
    samples = torch.tensor(list(members), dtype=torch.int64)
    tag, count = bin_tag(members), len(members)
    layout = PackedLayout(tag, (count,), (), samples, torch.zeros(0, dtype=torch.int64))
    labels = (torch.zeros(count, dtype=torch.int64), torch.ones(count), torch.tensor([tag]))
    return (torch.zeros(1, _WIDTH), layout.encode()), labels


if __name__ == "__main__":
    main()
