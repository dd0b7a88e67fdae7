"""Times of transfers and of the gradient reduction, from latency and bandwidth.

The rules, with their sources:

- A message of ``n`` bytes takes ``latency + n / bandwidth`` (the cost model of Thakur, Rabenseifner and
  Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1), section 3).
- A ring all-reduce over ``p`` ranks is a reduce-scatter and an all-gather of ``p - 1`` steps each, in
  every step each rank sends ``n / p`` bytes: ``2 (p - 1) latency + 2 (p - 1) / p * n / bandwidth``
  (Patarasu and Yuan 2009, J. Parallel Distrib. Comput. 69(2), which also shows that no algorithm moves
  fewer bytes). All ranks step together, so the slowest link of the ring sets the pace.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.slots import FloatArray


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between two ranks, each direction by itself.

    Attributes
    ----------
    latency_s : float
        Seconds of an empty message.
    bandwidth_bytes_per_s : float
        May be infinite.

    Raises
    ------
    SchedulingError
        If the latency is negative or the bandwidth not positive.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0.0 <= self.latency_s < math.inf and self.bandwidth_bytes_per_s > 0.0):
            raise SchedulingError(
                "a link needs a finite latency of at least 0 s and a positive bandwidth, found "
                f"{self.latency_s} s and {self.bandwidth_bytes_per_s} bytes/s. Correct the hardware "
                "description."
            )

    def shared(self, num_sharers: int) -> Link:
        """The part of each of several that send at the same time."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s / num_sharers)


def ring_all_reduce_s(num_bytes: npt.ArrayLike, num_ranks: int, link: Link) -> FloatArray:
    """Seconds of a ring all-reduce whose slowest link is `link`; 0 for a single rank.

    Parameters
    ----------
    num_bytes : array_like
        Bytes that each rank holds.
    num_ranks : int
    link : Link

    Raises
    ------
    SchedulingError
        If there is no rank, or bytes are negative.
    """
    return 2.0 * ring_all_gather_s(num_bytes, num_ranks, link)


def ring_all_gather_s(num_bytes: npt.ArrayLike, num_ranks: int, link: Link) -> FloatArray:
    """Seconds of a ring all-gather, or of a ring reduce-scatter, of so many bytes in all.

    Parameters and errors as for :func:`ring_all_reduce_s`.
    """
    size = np.asarray(num_bytes, dtype=np.float64)
    if num_ranks < 1 or not (size >= 0).all():
        raise SchedulingError(
            f"a collective needs at least 1 rank and no negative bytes, found {num_ranks} ranks and at least "
            f"{size.min() if size.size else 0} bytes. Correct the plan."
        )
    steps = num_ranks - 1
    result: FloatArray = steps * link.latency_s + (steps / num_ranks) * size / link.bandwidth_bytes_per_s
    return result


def ring_link(
    num_ranks: int, ranks_per_node: int, intra_node: Link, inter_node: Link, num_rings: int = 1
) -> Link:
    """Slowest link of a ring that visits every node once.

    Parameters
    ----------
    num_ranks, ranks_per_node : int
        Ranks of the group, and how many of them share a node.
    intra_node, inter_node : Link
        `inter_node` is what one node sends to the network.
    num_rings : int
        Groups that leave the same node at the same time and share its network.
    """
    return intra_node if num_ranks <= ranks_per_node else inter_node.shared(num_rings)
