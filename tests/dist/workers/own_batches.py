"""Microbatches of one's own, in one's own order, between planned steps; and what destroy() leaves."""

import glob
import multiprocessing
import os

from dflop_ds.runtime.distributed import leave
from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
segments = glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")
dataset = setup.dataset if engine.is_first_stage() else setup.dataset.without_media()
planned = float(engine.train_batch())
own = [setup.collate_fn([dataset[i] for i in members]) for members in arguments["bins"]]
mine = float(engine.train_batch(iter(own)))
again = float(engine.train_batch())
workers = len(multiprocessing.active_children())
engine.destroy()
left = len(multiprocessing.active_children())
report(
    arguments,
    {"planned": planned, "own": mine, "again": again, "workers": workers, "left": left, "segments": segments},
)
leave()
