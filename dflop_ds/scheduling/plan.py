"""What all ranks need to know of one optimizer step, as one short integer message."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import PlanError

SCHEMA_VERSION = 1
_HEADER = 8


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Samples of every bin of one optimizer step.

    Attributes
    ----------
    step, epoch : int
    num_replicas, num_microbatches : int
    bins : tuple of tuple of int
        Data set indices; bin ``replica * num_microbatches + microbatch``.
    num_terms : int
        What the loss is averaged over: supervised tokens of the global batch, or samples that
        have any.
    """

    step: int
    epoch: int
    num_replicas: int
    num_microbatches: int
    bins: tuple[tuple[int, ...], ...]
    num_terms: int

    def __post_init__(self) -> None:
        if len(self.bins) != self.num_replicas * self.num_microbatches:
            raise PlanError(
                f"a plan must hold {self.num_replicas} x {self.num_microbatches} bins, found "
                f"{len(self.bins)}; this is a fault of dflop_ds, please report it."
            )

    @property
    def loss_scale(self) -> float:
        """Factor of every token loss under DeepSpeed's mean over bins."""
        return len(self.bins) / max(1, self.num_terms)

    def replica_bins(self, replica: int) -> tuple[tuple[int, ...], ...]:
        """Bins of one replica, in the order of its microbatches."""
        start = replica * self.num_microbatches
        return self.bins[start : start + self.num_microbatches]

    def encode(self) -> npt.NDArray[np.int64]:
        """Write the plan as integers, checksum first."""
        lengths = [len(members) for members in self.bins]
        indices = [index for members in self.bins for index in members]
        body = np.array(
            [
                SCHEMA_VERSION,
                self.step,
                self.epoch,
                self.num_replicas,
                self.num_microbatches,
                self.num_terms,
                len(indices),
                *lengths,
                *indices,
            ],
            dtype=np.int64,
        )
        return np.concatenate([[np.int64(zlib.crc32(body.tobytes()))], body])

    @classmethod
    def decode(cls, message: npt.ArrayLike) -> StepPlan:
        """Read a plan written by :meth:`encode`.

        Raises
        ------
        PlanError
            If the message was damaged or written by another version.
        """
        numbers = np.asarray(message, dtype=np.int64)
        if numbers.size < _HEADER or int(numbers[0]) != zlib.crc32(numbers[1:].tobytes()):
            raise PlanError(
                "the checksum of a plan must match its content, found a damaged message; "
                "all ranks must run the same dflop_ds on reliable links."
            )
        version, step, epoch, num_replicas, num_microbatches, num_terms, num_indices = numbers[
            1:_HEADER
        ].tolist()
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"a plan must have schema version {SCHEMA_VERSION}, found {version}; "
                "all ranks must run the same dflop_ds."
            )
        num_bins = num_replicas * num_microbatches
        lengths = numbers[_HEADER : _HEADER + num_bins]
        members = np.split(numbers[_HEADER + num_bins :][:num_indices], np.cumsum(lengths)[:-1])
        return cls(step, epoch, num_replicas, num_microbatches, _as_bins(members), num_terms)


def _as_bins(members: Sequence[npt.NDArray[np.int64]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(index) for index in indices) for indices in members)
