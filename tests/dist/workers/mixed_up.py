"""A data set whose labels belong to other samples than its pixels: the tags must not match."""

import os
import sys

from dflop_ds.data.dataset import LlavaDataset
from dflop_ds.errors import PlanError
from tests.support.training import start, worker_arguments

original = LlavaDataset.__getitem__


def shifted(self, index):
    return original(self, index if self.load_media else (index + 1) % len(self))


engine, _ = start(worker_arguments()["config"])
LlavaDataset.__getitem__ = shifted
try:
    engine.train_batch()
except PlanError as error:
    print(error)
    sys.stdout.flush()
    os._exit(3)
