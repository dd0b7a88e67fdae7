"""Steps with adapters: exports before and after, losses, gradients of the last step."""

import os

import numpy as np

from dflop_ds.runtime.adapter import save_adapter
from dflop_ds.runtime.distributed import leave
from dflop_ds.runtime.export import export_engine
from tests.support.training import keep_gradients, report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
base = {n: p.detach().clone() for n, p in setup.model.named_parameters() if not p.requires_grad}
save_adapter(setup.model, f"{arguments['out']}/before", "base")
kept = keep_gradients(engine)
losses = [float(engine.train_batch()) for _ in range(arguments["num_steps"])]
save_adapter(setup.model, f"{arguments['out']}/after", "base")
np.savez(f"{arguments['out']}/grads{os.environ['RANK']}.npz", **{n: g.numpy() for n, g in kept.items()})
unchanged = all(bool((p == base[n]).all()) for n, p in setup.model.named_parameters() if n in base)
result = {"losses": losses, "unchanged": unchanged, "num_frozen": len(base)}
result["eval"] = engine.evaluate(setup.dataset)
if arguments["export"]:
    engine.save_checkpoint(f"{arguments['out']}/checkpoints")
    export_engine(engine, arguments["config"]["dflop"]["model"]["path"], f"{arguments['out']}/merged")
report(arguments, result)
engine.destroy()
leave()
