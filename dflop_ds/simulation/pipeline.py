"""Event simulation of a 1F1B pipeline with different times per stage and microbatch."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.schedule import check_pipeline
from dflop_ds.simulation.slots import FloatArray, constant_transfers, in_slots, run, slots_of


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineResult:
    """When everything ran, seconds from the first forward.

    Attributes
    ----------
    makespan_s : float
        First forward to last backward.
    busy_s : ndarray, shape (num_stages,)
        Time that each stage computed.
    bubble_fraction : float
        ``1 - busy / (num_stages * makespan)``; 0.0 if the makespan is 0.
    forward_start_s, forward_end_s : ndarray, shape (num_stages, num_microbatches)
    backward_start_s, backward_end_s : ndarray, shape (num_stages, num_microbatches)
    """

    makespan_s: float
    busy_s: FloatArray
    bubble_fraction: float
    forward_start_s: FloatArray
    forward_end_s: FloatArray
    backward_start_s: FloatArray
    backward_end_s: FloatArray


def _ends_s(forward_s: FloatArray, backward_s: FloatArray, send_s: float) -> tuple[FloatArray, FloatArray]:
    """End of each forward and backward; arrays of shape (num_stages, num_microbatches, num_cases)."""
    num_stages, num_microbatches, _ = forward_s.shape
    slots = slots_of(num_stages, num_microbatches)
    transfers = constant_transfers(num_stages, num_microbatches, send_s)
    _, end_s = run(in_slots(slots, forward_s, backward_s), transfers)
    return end_s[slots.forward, slots.stages], end_s[slots.backward, slots.stages]


def _checked(
    forward_s: npt.ArrayLike, backward_s: npt.ArrayLike, send_s: float, ndim: int
) -> tuple[FloatArray, FloatArray]:
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    if forward.ndim != ndim or forward.shape != backward.shape:
        raise SchedulingError(
            f"forward_s and backward_s must have the same shape with {ndim} dimensions, found "
            f"{forward.shape} and {backward.shape}. Give one number per stage and microbatch."
        )
    check_pipeline(forward.shape[-2], forward.shape[-1])
    for name, values in (("forward_s", forward), ("backward_s", backward), ("send_s", np.asarray(send_s))):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise SchedulingError(
                f"{name} must be finite and not negative, found a value that is not. Correct the times."
            )
    return forward, backward


def simulate_1f1b(
    forward_s: npt.ArrayLike, backward_s: npt.ArrayLike, *, send_s: float = 0.0
) -> PipelineResult:
    """Simulate one optimizer step of a 1F1B pipeline.

    Every stage runs its work in 1F1B order, each piece as soon as the piece before has ended and its input
    has arrived. Reductions and the optimizer step are not part of it.

    Parameters
    ----------
    forward_s, backward_s : array_like, shape (num_stages, num_microbatches)
        Seconds of each forward and backward.
    send_s : float
        Seconds from the end of a piece to the arrival of its output at the neighbour stage; the sender is
        free meanwhile.

    Raises
    ------
    SchedulingError
        If shapes differ, or a time is negative, NaN or infinite.
    """
    forward, backward = _checked(forward_s, backward_s, send_s, 2)
    forward_end, backward_end = _ends_s(forward[..., None], backward[..., None], send_s)
    makespan_s = float(backward_end.max())
    busy_s = forward.sum(axis=1) + backward.sum(axis=1)
    bubble = 1.0 - float(busy_s.sum()) / (len(busy_s) * makespan_s) if makespan_s > 0 else 0.0
    return PipelineResult(
        makespan_s=makespan_s,
        busy_s=busy_s,
        bubble_fraction=max(0.0, bubble),
        forward_start_s=forward_end[..., 0] - forward,
        forward_end_s=forward_end[..., 0],
        backward_start_s=backward_end[..., 0] - backward,
        backward_end_s=backward_end[..., 0],
    )


def makespans_1f1b(forward_s: npt.ArrayLike, backward_s: npt.ArrayLike, *, send_s: float = 0.0) -> FloatArray:
    """Makespans of many pipelines of one shape at once.

    Parameters
    ----------
    forward_s, backward_s : array_like, shape (num_cases, num_stages, num_microbatches)
        As in :func:`simulate_1f1b`.
    send_s : float

    Returns
    -------
    ndarray, shape (num_cases,)
        Seconds.

    Raises
    ------
    SchedulingError
        As in :func:`simulate_1f1b`.
    """
    forward, backward = _checked(forward_s, backward_s, send_s, 3)
    contiguous = [np.ascontiguousarray(np.moveaxis(values, 0, -1)) for values in (forward, backward)]
    _, backward_end_s = _ends_s(contiguous[0], contiguous[1], send_s)
    result: FloatArray = backward_end_s.max(axis=(0, 1))
    return result
