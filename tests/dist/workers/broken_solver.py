"""Training while the solver process is killed, and while it is stopped."""

import os
import signal
import time

from tests.support.training import report, start, worker_arguments

arguments = worker_arguments()
engine, _ = start(arguments["config"])
feed = engine.feed
losses, times_s, pids = [], [], []
for step in range(8):
    if feed.solver is not None and step in (2, 5):
        while feed.solver.pid is None:
            time.sleep(0.05)
        pids.append(feed.solver.pid)
        os.kill(pids[-1], signal.SIGKILL if step == 2 else signal.SIGSTOP)
    start_s = time.perf_counter()
    losses.append(float(engine.train_batch()))
    times_s.append(time.perf_counter() - start_s)
started = 0 if feed.solver is None else feed.solver.num_started
fallbacks = feed.num_fallbacks
engine.destroy()
alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
report(
    arguments,
    {"losses": losses, "times_s": times_s, "fallbacks": fallbacks, "started": started, "alive": alive},
)
