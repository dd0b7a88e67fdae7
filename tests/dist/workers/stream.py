"""Steps over a stream: plans by sample id, losses; saves in between, or goes on from what was saved."""

from dflop_ds.runtime.distributed import leave
from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
if arguments.get("resume"):
    path, _ = engine.load_checkpoint(arguments["resume"])
    assert path is not None
plans, losses = [], []
next_step = engine.feed.next_step


def recorded():
    plan = next_step()
    plans.append([list(members) for members in plan.bins])
    return plan


engine.feed.next_step = recorded
for step in range(engine.global_steps, arguments["num_steps"]):
    if step == arguments.get("save_at"):
        engine.save_checkpoint(arguments["checkpoints"])
    losses.append(float(engine.train_batch()))
kept = len(setup.dataset.records._kept)
report(arguments, {"plans": plans, "losses": losses, "kept": kept, "type": type(setup.dataset).__name__})
engine.destroy()
leave()
