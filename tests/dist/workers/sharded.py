"""Cut layers over the ranks, compare them with whole ones, then profile through the command line."""

from __future__ import annotations

import glob
import json
import os
import sys
from pathlib import Path

from transformers import AutoConfig

from dflop_ds.cli.main import main
from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.models.llava_onevision import pipeline_layers
from dflop_ds.profiling.tensor_parallel import TensorParallelGroup
from dflop_ds.runtime import distributed
from dflop_ds.runtime.distributed import leave

arguments = json.loads(sys.argv[1])
out = Path(arguments["out"])
distributed.start()
rank = distributed.dist.get_rank()
group = TensorParallelGroup(distributed.device(), (4, 2))
dataset = from_pretrained_dir(
    arguments["model_dir"], arguments["train_path"], media_root=Path(arguments["train_path"]).parent
)
collate = PackedCollator(0, row_shape=dataset.processor.row_shape)
(pixels, vector), _ = collate([dataset[arguments["index"]]])


def run(layer, plan, hidden):
    leaf = hidden.detach().requires_grad_(hidden.is_floating_point() and plan.kind != "vision_embed")
    result = layer((leaf, vector))
    output = result[0] if isinstance(result, tuple) else result
    output.square().sum().backward()
    return output.detach(), leaf.grad


differences, hidden = {}, pixels
for plan in pipeline_layers(AutoConfig.from_pretrained(arguments["model_dir"])):
    whole, gradient = run(plan.build(), plan, hidden)
    shared, shared_gradient = run(group.shard(plan.build()), plan, hidden)
    difference = float((whole - shared).abs().max() / whole.abs().max())
    if gradient is not None:
        difference = max(difference, float((gradient - shared_gradient).abs().max() / gradient.abs().max()))
    differences[plan.kind] = difference
    hidden = whole
decisions = group.agree([rank == 0, rank == 1])
code = main(["profile", "model", arguments["config"], "--out", str(out / "profile.json"), "--budget-s", "1"])
segments = glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")
report = {"differences": differences, "decisions": decisions, "code": code, "segments": segments}
(out / f"rank{rank}.json").write_text(json.dumps(report))
leave()
