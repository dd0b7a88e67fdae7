"""Training with adaptive correction; rank 1 is made slow by sleeping after every forward pass."""

import os
import time

from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, setup = start(arguments["config"])
if os.environ["RANK"] == "1":
    forward = engine.module.forward

    def slow(*args, **kwargs):
        start_s = time.perf_counter()
        result = forward(*args, **kwargs)
        time.sleep(4 * (time.perf_counter() - start_s))
        return result

    engine.module.forward = slow
losses, shares = [], []
next_step = engine.feed.next_step
tokens = setup.dataset.table.llm_tokens


def recorded():
    plan = next_step()
    loads = [sum(int(tokens[i]) for members in plan.replica_bins(r) for i in members) for r in (0, 1)]
    shares.append(loads[1] / sum(loads))
    return plan


engine.feed.next_step = recorded
for _ in range(arguments["num_steps"]):
    losses.append(float(engine.train_batch()))
state = engine.adaptive.state_dict()
engine.save_checkpoint(arguments["out"] + "/checkpoint")
engine.adaptive.correction.factors[:] = 1.7
engine.load_checkpoint(arguments["out"] + "/checkpoint")
result = {
    "losses": losses,
    "shares": shares,
    "slowness": engine.adaptive.correction.replica_slowness().tolist(),
    "state": state,
    "restored": engine.adaptive.state_dict(),
}
report(arguments, result)
engine.destroy()
