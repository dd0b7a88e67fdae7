"""Seconds of transfers, of the gradient reduction and of the optimizer step, from the hardware description.

- Transfers and rings follow :mod:`dflop_ds.simulation.network`.
- ZeRO-1 reduces gradients and gathers the updated weights: the same bytes as an all-reduce (Rajbhandari et
  al. 2020, arXiv 1910.02054, section 7.1).
- Adam reads gradient, weight copy and two moments and writes the last three, in fp32: 28 bytes a parameter.

Ranks are placed as DeepSpeed's topology places them: the ranks of a tensor-parallel group are neighbours,
then the replicas of a stage, then the stages; the encoder's GPUs come before the LLM's.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from dflop_ds.planning.hardware import Hardware
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.simulation.network import Link, ring_all_reduce_s, ring_link
from dflop_ds.simulation.work import StepEnd

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ADAM_BYTES = 28.0


def node_links(hardware: Hardware) -> tuple[Link, Link]:
    """Links of a GPU within its node and to other nodes."""
    return (
        Link(hardware.intra_node_latency_s, hardware.intra_node_bytes_per_s),
        Link(hardware.inter_node_latency_s, hardware.inter_node_bytes_per_s),
    )


def tensor_reduction_s(hardware: Hardware, tensor: int, num_bytes: npt.ArrayLike) -> FloatArray:
    """Seconds of one all-reduce within a tensor-parallel group, without the start of the collective."""
    return ring_all_reduce_s(num_bytes, tensor, node_links(hardware)[0])


def reduce_s(hardware: Hardware, tensor: IntArray, data: IntArray, num_bytes: FloatArray) -> FloatArray:
    """Seconds to reduce gradients over the replicas of a stage.

    Parameters
    ----------
    hardware : Hardware
    tensor, data : ndarray, shape (n,)
        Parallel degrees.
    num_bytes : ndarray, shape (n,)
        Gradients of one rank.
    """
    intra, inter = node_links(hardware)
    result = np.zeros(len(data))
    keys = tensor * (int(data.max(initial=0)) + 1) + data
    for key in np.unique(keys):
        rows = keys == key
        width, replicas = int(tensor[rows][0]), int(data[rows][0])
        if replicas > 1:
            per_node = max(1, hardware.gpus_per_node // width)
            link = ring_link(replicas, per_node, intra, inter)
            result[rows] = hardware.collective_latency_s + ring_all_reduce_s(num_bytes[rows], replicas, link)
    return result


def optimizer_s(
    hardware: Hardware, num_parameters: FloatArray, data: IntArray, zero_stage: IntArray
) -> FloatArray:
    """Seconds of Adam on the parameters of one rank; with ZeRO-1 every replica steps its share."""
    share = np.where(zero_stage == 1, data, 1)
    return num_parameters / share * (_ADAM_BYTES / hardware.memory_bytes_per_s)


def step_end(hardware: Hardware, layout: Layout, num_trained: FloatArray, value_bytes: int) -> StepEnd:
    """What follows the last backward: the reduction and the optimizer step of every stage.

    Parameters
    ----------
    hardware : Hardware
    layout : Layout
    num_trained : ndarray, shape (num_stages,)
        Trained parameters of every stage, before they are divided by its tensor degree.
    value_bytes : int
        Of a gradient.
    """
    tensor, data = (
        np.array([getattr(degrees, name) for degrees in layout.stage_degrees]) for name in ("tensor", "data")
    )
    own = num_trained / tensor
    return StepEnd(
        reduce_s=reduce_s(hardware, tensor, data, own * value_bytes),
        optimizer_s=optimizer_s(hardware, own, data, np.full(len(data), layout.zero_stage)),
    )


def stage_links(hardware: Hardware, layout: Layout) -> list[Link]:
    """Link between every stage and the next; the slowest one that some replica uses."""
    ranks: list[range] = []
    for degrees in filter(None, (layout.encoder, layout.llm)):
        ranks += _stage_ranks(degrees, ranks[-1].stop if ranks else 0)
    intra, inter = node_links(hardware)
    size = hardware.gpus_per_node
    links = []
    for here, there in itertools.pairwise(ranks):
        one_node = here.start // size == (there.stop - 1) // size
        shift = there.start - here.start
        aligned = len(here) == len(there) and all(rank // size == (rank + shift) // size for rank in here)
        links.append(intra if one_node or aligned else inter)
    return links


def _stage_ranks(degrees: Degrees, first: int) -> list[range]:
    size = degrees.tensor * degrees.data
    return [range(first + stage * size, first + (stage + 1) * size) for stage in range(degrees.pipeline)]
