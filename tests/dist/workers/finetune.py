"""Steps with parts of the model frozen: losses, first gradients, final weights, messages of gradients."""

import collections
import os

import numpy as np
from deepspeed.runtime.pipe import p2p

from dflop_ds.runtime.distributed import leave
from tests.support.training import keep_gradients, report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
num_sent: collections.Counter[bool] = collections.Counter()
send = p2p.send


def counted(tensor, dest_stage, *args, **kwargs):
    num_sent[dest_stage < engine.stage_id] += 1
    return send(tensor, dest_stage, *args, **kwargs)


p2p.send = counted


def weights():
    return {
        layer.hf_name(name): parameter.detach().double().numpy().copy()
        for layer in setup.model.local_layers()
        for name, parameter in layer.named_parameters()
    }


before, kept = weights(), keep_gradients(engine) if arguments.get("gradients") else {}
losses, first = [], {}
for _ in range(arguments["num_steps"]):
    losses.append(float(engine.train_batch()))
    first = first or {f"grad/{name}": grad.numpy() for name, grad in kept.items()}
after = {f"weight/{name}": value for name, value in weights().items()}
np.savez(f"{arguments['out']}/state{os.environ['RANK']}.npz", **first, **after)
report(
    arguments,
    {
        "losses": losses,
        "eval": engine.evaluate(setup.eval_dataset) if setup.eval_dataset is not None else None,
        "unchanged": sorted(name for name in before if np.array_equal(before[name], after[f"weight/{name}"])),
        "gradients_sent": num_sent[True],
        "num_optimized": sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"]),
        "optimizer": type(engine.optimizer).__name__,
        "dtype": str(getattr(engine.optimizer, "grad_acc_dtype", None)),
        "backward_s": setup.model.stage_training() is not None,
    },
)
engine.destroy()
leave()
