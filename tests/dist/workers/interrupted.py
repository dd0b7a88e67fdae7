"""``dflop_ds.train``, struck by a signal on the way; writes which samples each rank loads.

``arguments["strike"]`` is ``null`` or has "signal", "ranks", and either "step" (this process's n-th step)
or "file" (the n-th file that rank 0 writes with ``torch.save``).
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from dflop_ds.data.dataset import LlavaDataset
from dflop_ds.train import run
from tests.support.training import worker_arguments

arguments = worker_arguments()
out, rank, strike = Path(arguments["out"]), int(os.environ["RANK"]), arguments["strike"] or {}
(out / f"pid{rank}").write_text(str(os.getpid()))


def counted(owner, name, number):
    original, calls = getattr(owner, name), 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            for other in sorted(strike["ranks"], key=rank.__eq__):  # this rank last
                # The data workers of the rank get the signal as well, as they do from a terminal.
                os.killpg(int((out / f"pid{other}").read_text()), signal.Signals[strike["signal"]])
            time.sleep(0.3)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


if "step" in strike and rank == strike["ranks"][0]:
    counted(torch.autograd, "backward", 4 * (strike["step"] - 1) + 2)
if "file" in strike and rank == 0:
    counted(torch, "save", strike["file"])

original = LlavaDataset.__getitem__


def noted(self, index):
    with (out / f"loaded{rank}").open("a") as file:
        file.write(f"{index}\n")
    return original(self, index)


LlavaDataset.__getitem__ = noted
sys.argv[1:] = ["--deepspeed_config", arguments["config_path"]]
run()
