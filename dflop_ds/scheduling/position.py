"""Where training stands in its data: what a checkpoint must know to go on with the same samples."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

from dflop_ds.errors import ConfigError
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.scheduling.windows import StreamPlanner

_SETTINGS = {
    "seed": "dflop.seed",
    "batch_size": "train_batch_size",
    "shuffle": "dflop.data.shuffle",
    "tail": "dflop.data.tail",
    "num_samples": "the number of usable training samples",
    "samples_digest": "the ids of the training samples (as a checksum)",
}


@dataclasses.dataclass(frozen=True)
class SamplerPosition:
    """Position in the sequence of global batches, and what the sequence depends on.

    Attributes
    ----------
    step : int
        Global batches trained so far; the number of the next one.
    epoch : int
        Epoch of the next global batch.
    consumed_samples : int
        Samples of that epoch that were trained before it.
    seed, batch_size, num_samples : int
    shuffle : bool
    tail : str
        As in :class:`~dflop_ds.scheduling.order.EpochOrder`.
    samples_digest : int
        Checksum of the sample ids and their data set indices.
    """

    step: int
    epoch: int
    consumed_samples: int
    seed: int
    batch_size: int
    shuffle: bool
    tail: str
    num_samples: int
    samples_digest: int

    @classmethod
    def of(cls, planner: StepPlanner | StreamPlanner, step: int) -> SamplerPosition:
        """Position of a planner's data before ``step``; of a stream, in windows instead of epochs."""
        order = planner.order
        epoch, index = divmod(step, order.steps_per_epoch)
        names = "\0".join(planner.table.sample_ids).encode()
        return cls(
            step=step,
            epoch=epoch,
            consumed_samples=index * order.batch_size,
            seed=order.seed,
            batch_size=order.batch_size,
            shuffle=order.shuffle,
            tail=order.tail,
            num_samples=order.num_samples,
            samples_digest=zlib.crc32(planner.rows.tobytes(), zlib.crc32(names)),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SamplerPosition:
        """Read what ``dataclasses.asdict`` gave.

        Raises
        ------
        ConfigError
            If a field is missing or unknown.
        """
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigError(
                f"the position in the data must be complete, found {error}; use another checkpoint."
            ) from error

    def require_same_sequence(self, current: SamplerPosition) -> None:
        """Make sure that another run goes through the samples in the same order.

        The number of replicas and of pipeline stages may differ.

        Parameters
        ----------
        current : SamplerPosition
            Of the run that wants to go on.

        Raises
        ------
        ConfigError
            Naming everything that differs.
        """
        changed = [
            f"{words} was {getattr(self, field)!r}, found {getattr(current, field)!r}"
            for field, words in _SETTINGS.items()
            if getattr(self, field) != getattr(current, field)
        ]
        if changed:
            raise ConfigError(
                "a run can only be resumed with the sequence of samples that it began with: "
                + "; ".join(changed)
                + ". Change it back, or load the weights alone with load_checkpoint(..., "
                "load_module_only=True)."
            )
