"""Which samples form which global batch: a pure function of seed and epoch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """Samples of one optimizer step.

    Attributes
    ----------
    step : int
        Optimizer step since the start of training, from 0.
    epoch : int
    positions : ndarray of int64, shape (n,)
        Rows of the shape table, in data-blind order.
    """

    step: int
    epoch: int
    positions: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """Order of the samples over the epochs.

    Parameters
    ----------
    num_samples : int
    batch_size : int
        Samples per global batch.
    seed : int
    shuffle : bool
    tail : {"partial", "drop"}
        What becomes of the samples that do not fill a global batch: a smaller last batch, or
        left out of this epoch (another shuffle leaves out others).

    Raises
    ------
    ConfigError
        If there are no samples, or dropping the tail leaves no batch.
    """

    num_samples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    tail: str = "partial"

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.steps_per_epoch < 1:
            raise ConfigError(
                f"an epoch must hold at least one global batch of {self.batch_size} samples, found "
                f"{self.num_samples} samples; add data, lower train_batch_size or set dflop.data.tail "
                f'to "partial".'
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        if self.tail == "drop":
            return self.num_samples // self.batch_size
        return math.ceil(self.num_samples / self.batch_size)

    def batch(self, step: int) -> GlobalBatch:
        """Samples of optimizer step ``step``."""
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.batch_size
        return GlobalBatch(step, epoch, self.permutation(epoch)[start : start + self.batch_size])

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """All rows in the order of ``epoch``, shape (num_samples,)."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
