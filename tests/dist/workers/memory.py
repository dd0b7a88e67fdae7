"""Peak of the live tensors in one training step of the engine, beyond what lasts from step to step."""

import gc

import torch

from dflop_ds.runtime.distributed import leave
from tests.support.live_bytes import LiveBytes
from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
plans = []
next_step = engine.feed.next_step
engine.feed.next_step = lambda: plans.append(next_step()) or plans[-1]
engine.train_batch()  # makes what lasts: optimizer state, master weights
gc.collect()
lasting = [
    thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"
]
with LiveBytes(*lasting) as live:
    engine.train_batch()
kinds = [layer.kind for layer in setup.model.local_layers()]
report(
    arguments,
    {"peak_bytes": live.peak_bytes, "bins": [list(members) for members in plans[1].bins], "kinds": kinds},
)
engine.destroy()
leave()
