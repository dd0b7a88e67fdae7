"""Seconds of collectives, transfers and the optimizer step, from the hardware description.

- A ring all-reduce of b bytes over n ranks passes ``2 (n - 1) / n * b`` bytes through every link in ``2 (n - 1)``
  steps (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).
- ZeRO-1 reduces gradients and gathers the updated weights: the same bytes (Rajbhandari et al. 2020,
  arXiv 1910.02054, section 7.1).
- Adam reads gradient, weight copy and two moments and writes the last three, in fp32: 28 bytes a parameter.

Ranks are placed as DeepSpeed's topology places them: the ranks of a tensor-parallel group are neighbours, then
the replicas of a stage, then the stages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflop_ds.planning.hardware import Hardware

FloatArray = npt.NDArray[np.float64]

_ADAM_BYTES = 28.0


def ring_s(
    hardware: Hardware, num_ranks: npt.ArrayLike, num_bytes: npt.ArrayLike, across_nodes: npt.ArrayLike
) -> FloatArray:
    """Seconds of ring all-reduces, any shape; 0 for one rank."""
    ranks = np.asarray(num_ranks, dtype=np.float64)
    bandwidth, latency_s = _link(hardware, across_nodes)
    step_s = latency_s + np.asarray(num_bytes, dtype=np.float64) / ranks / bandwidth
    return np.where(ranks > 1, hardware.collective_latency_s + 2.0 * (ranks - 1.0) * step_s, 0.0)


def send_s(hardware: Hardware, num_bytes: npt.ArrayLike, across_nodes: npt.ArrayLike) -> FloatArray:
    """Seconds from one stage to the next, any shape."""
    bandwidth, latency_s = _link(hardware, across_nodes)
    return np.asarray(latency_s + np.asarray(num_bytes, dtype=np.float64) / bandwidth)


def update_s(
    hardware: Hardware,
    tensor: npt.ArrayLike,
    data: npt.ArrayLike,
    num_parameters: npt.ArrayLike,
    gradient_bytes: int,
    zero_stage: npt.ArrayLike,
) -> FloatArray:
    """Seconds to reduce the gradients of a stage over its replicas and step the optimizer, any shape.

    Parameters
    ----------
    hardware : Hardware
    tensor, data : array_like of int
        Parallel degrees.
    num_parameters : array_like
        Of the whole stage, before tensor parallelism divides them.
    gradient_bytes : int
        Bytes of one reduced gradient.
    zero_stage : array_like of int
        1: every replica steps its share only.
    """
    own = np.asarray(num_parameters, dtype=np.float64) / np.asarray(tensor)
    across = np.asarray(tensor) * np.asarray(data) > hardware.gpus_per_node
    stepped = np.where(np.asarray(zero_stage) == 1, own / np.asarray(data), own)
    return ring_s(hardware, data, own * gradient_bytes, across) + stepped * (
        _ADAM_BYTES / hardware.memory_bytes_per_s
    )


def _link(hardware: Hardware, across_nodes: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    across = np.asarray(across_nodes, dtype=np.bool_)
    return (
        np.where(across, hardware.inter_node_bytes_per_s, hardware.intra_node_bytes_per_s),
        np.where(across, hardware.inter_node_latency_s, hardware.intra_node_latency_s),
    )
