"""Gradients of one training step by the pipeline, written as NPZ by Hugging Face name."""

import os

import numpy as np

from dflop_ds.runtime.distributed import leave
from tests.support.training import keep_gradients, report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
kept = keep_gradients(engine)
plans = []
next_step = engine.feed.next_step
engine.feed.next_step = lambda: plans.append(next_step()) or plans[-1]
loss = engine.train_batch()
np.savez(
    f"{arguments['out']}/grads{os.environ['RANK']}.npz", **{name: grad.numpy() for name, grad in kept.items()}
)
bins = [list(members) for members in plans[0].bins]
report(arguments, {"loss": float(loss), "bins": bins, "parts": list(setup.model.parts)})
engine.destroy()
leave()
