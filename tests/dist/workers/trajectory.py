"""Several training steps: losses, plans, evaluations and how often the overrides ran."""

import collections
import math
import zlib

import torch

from dflop_ds.models.layers import PipelineLayer
from dflop_ds.runtime import compat
from dflop_ds.runtime.distributed import leave
from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
calls: collections.Counter[str] = collections.Counter()


def counted(owner, name):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        # A layer on the meta device, of which only names and shapes are wanted, is not built.
        calls[name] += name != "__init__" or torch.get_default_device().type != "meta"
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


counted(compat, "backward_once")
counted(compat, "fill_missing_gradients")
counted(torch.autograd, "backward")
counted(PipelineLayer, "__init__")
engine, setup = start(arguments["config"])
num_built = calls["__init__"]
calls.clear()  # profiling runs backward passes as well
counted(engine, "_check_tag")
losses, evals, plans, digests = [], [], [], []
next_step = engine.feed.next_step


def recorded():
    plan = next_step()
    digests.append(zlib.crc32(plan.encode().tobytes()))
    plans.append([list(members) for members in plan.bins])
    return plan


engine.feed.next_step = recorded
if arguments.get("evaluate"):
    evals.append(engine.evaluate(setup.dataset))
for _ in range(arguments["num_steps"]):
    losses.append(float(engine.train_batch()))
    if arguments.get("evaluate"):
        evals.append(engine.evaluate(setup.dataset))
result = {"losses": losses, "evals": evals, "plans": plans, "digests": digests}
if arguments.get("checkpoint"):
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.save_checkpoint(arguments["out"] + "/checkpoint")
    engine.train_batch()
    result["moved"] = max(
        float((p - before[name]).abs().max()) for name, p in engine.module.named_parameters()
    )
    engine.load_checkpoint(arguments["out"] + "/checkpoint")
    result["restored"] = max(
        float((p - before[name]).abs().max()) for name, p in engine.module.named_parameters()
    )
result["calls"] = dict(calls)
if arguments.get("evaluate"):
    if engine.global_rank == 1:
        engine.request_stop()
    result["stopped"] = [math.isnan(engine.evaluate(setup.dataset)), engine.stopping]
result["num_built"], result["parts"] = num_built, [int(part) for part in engine.module.parts]
result["dtype"] = str(next(engine.module.parameters()).dtype)
report(arguments, result)
engine.destroy()
leave()
