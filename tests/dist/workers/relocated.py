"""Load a checkpoint where one is given, note the state, train, note it again, save and export."""

import os

import numpy as np
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from dflop_ds.runtime.distributed import leave
from dflop_ds.runtime.export import export_engine
from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
optimizer, rank = engine.optimizer, os.environ["RANK"]


def note(file):
    """Weights and moments of this rank's parameters, as DeepSpeed itself puts them together."""
    content = {}
    partitioned = hasattr(optimizer, "_lazy_init_hp_params_optimizer_state")
    if partitioned:
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        content[f"{name} weight"] = p.detach().float()
        if partitioned:
            content[f"{name} master"] = safe_get_full_fp32_param(p)
            content[f"{name} exp_avg"] = safe_get_full_optimizer_state(p, "exp_avg")
            content[f"{name} exp_avg_sq"] = safe_get_full_optimizer_state(p, "exp_avg_sq")
        else:
            content[f"{name} master"] = p.detach()
            content[f"{name} exp_avg"] = optimizer.state[p]["exp_avg"]
            content[f"{name} exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"]
    base = optimizer.optimizer if partitioned else optimizer
    steps = {float(state["step"]) for state in base.state.values()}
    np.savez(
        f"{arguments['out']}/{file}{rank}.npz", **{name: value.numpy() for name, value in content.items()}
    )
    return sorted(steps)


result = {"parts": [int(part) for part in engine.module.parts]}
if arguments.get("load"):
    path, state = engine.load_checkpoint(arguments["load"])
    result |= {"path": path, "client": state.get("mine"), "steps": note("loaded")}
    result["lr"] = [group["lr"] for group in optimizer.param_groups]
plans = []
next_step = engine.feed.next_step
engine.feed.next_step = lambda: plans.append(next_step()) or plans[-1]
result["losses"] = [float(engine.train_batch()) for _ in range(arguments["num_steps"])]
result["batches"] = [sorted(i for members in plan.bins for i in members) for plan in plans]
note("trained")
engine.save_checkpoint(arguments["out"] + "/checkpoints", client_state={"mine": 42})
if arguments.get("export"):
    export_engine(engine, arguments["config"]["dflop"]["model"]["path"], arguments["out"] + "/export", "fp32")
result["next"] = [float(engine.train_batch()) for _ in range(2)]
report(arguments, result)
engine.destroy()
leave()
