"""Trains with a configuration that `dflop-ds plan` wrote, and reports what the engine made of it."""

from dflop_ds.config import load_ds_config
from dflop_ds.runtime.distributed import leave
from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(load_ds_config(arguments["plan"]))
losses = [float(engine.train_batch()) for _ in range(arguments["num_steps"])]
report(
    arguments,
    {
        "parts": [int(part) for part in setup.model.parts],
        "num_microbatches": engine.gradient_accumulation_steps(),
        "train_batch_size": engine.train_batch_size(),
        "zero_stage": engine.zero_optimization_stage(),
        "losses": losses,
    },
)
leave()
