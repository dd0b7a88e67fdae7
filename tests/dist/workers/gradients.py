"""Gradients of one training step by the pipeline, written as NPZ by Hugging Face name."""

import os

import numpy as np
from tests.support.training import keep_gradients, report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
kept = keep_gradients(engine)
loss = engine.train_batch()
plan = engine.feed.history.get(0)
np.savez(f"{arguments['out']}/grads{os.environ['RANK']}.npz", **{name: grad.numpy() for name, grad in kept.items()})
bins = [list(members) for members in plan.plan.bins] if plan else []
report(arguments, {"loss": float(loss), "bins": bins, "parts": list(setup.model.parts)})
engine.destroy()
