"""What a simulated step consists of: modules, network, and what follows the last backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.network import Link
from dflop_ds.simulation.schedule import check_pipeline
from dflop_ds.simulation.slots import FloatArray

_SIZES = ("output_bytes", "activation_bytes")


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleWork:
    """What the stages of one module compute.

    Arrays have the shape (num_cases, num_replicas, num_stages, num_microbatches).

    Attributes
    ----------
    forward_s, backward_s : ndarray of float64
        Seconds of every pass. Cases are independent: global batches, or candidates of one pipeline shape.
    output_bytes : ndarray of float64 or None
        Bytes that a stage hands to the next one, and whose gradient it gets back; may be of any shape that
        broadcasts. At the border of two modules: the part of this replica.
    activation_bytes : ndarray of float64 or None
        Bytes that a stage keeps from forward to backward; may be of any shape that broadcasts.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    output_bytes: FloatArray | None = None
    activation_bytes: FloatArray | None = None


@dataclasses.dataclass(frozen=True)
class Network:
    """How stages hand over activations and gradients.

    Attributes
    ----------
    links : Link or sequence of Link, length num_stages - 1
        Between stage ``i`` and ``i + 1``, counted over all modules; one Link stands for all.
    sends : {"overlapped", "rendezvous"}
        overlapped: a message leaves as soon as it is computed and the sender goes on; messages of one
        direction of a link follow one another.
        rendezvous: sender and receiver are both held until the message has arrived, as with the blocking
        sends of DeepSpeed.
    """

    links: Link | Sequence[Link] = dataclasses.field(default_factory=Link)
    sends: Literal["overlapped", "rendezvous"] = "overlapped"


@dataclasses.dataclass(frozen=True, eq=False)
class StepEnd:
    """What follows the last backward; arrays broadcast to (num_cases, num_stages), all modules' stages.

    Attributes
    ----------
    reduce_s : array_like
        Seconds of the gradient reduction over the replicas of a stage, which begins when the last of them
        is ready.
    optimizer_s : array_like
        Seconds of the optimizer step of a stage.
    clips_gradients : bool
        The norm of all gradients is taken first, so that no stage steps before all have reduced.
    fixed_s : float
        Seconds of a step outside of the pipeline: loss, plan, bookkeeping.
    """

    reduce_s: npt.ArrayLike = 0.0
    optimizer_s: npt.ArrayLike = 0.0
    clips_gradients: bool = True
    fixed_s: float = 0.0


def checked_works(modules: Sequence[ModuleWork]) -> list[ModuleWork]:
    """The modules as arrays of one shape each; raises SchedulingError where they do not fit."""
    if not modules:
        raise SchedulingError("a step needs at least one module, found none. Pass their times.")
    works = []
    for module in modules:
        forward_s, backward_s = (
            np.asarray(values, dtype=np.float64) for values in (module.forward_s, module.backward_s)
        )
        if forward_s.ndim != 4 or forward_s.shape != backward_s.shape or 0 in forward_s.shape[:2]:
            raise SchedulingError(
                "forward_s and backward_s must have the same shape (num_cases, num_replicas, num_stages, "
                f"num_microbatches), found {forward_s.shape} and {backward_s.shape}. Correct the arrays."
            )
        check_pipeline(forward_s.shape[2], forward_s.shape[3])
        sizes = [_bytes(getattr(module, name), name, forward_s.shape) for name in _SIZES]
        works.append(ModuleWork(forward_s, backward_s, *sizes))
        for name in ("forward_s", "backward_s", *_SIZES):
            values = getattr(works[-1], name)
            if values is not None and not (np.isfinite(values) & (values >= 0)).all():
                raise SchedulingError(
                    f"{name} must be finite and not negative, found a value that is not. Correct the values."
                )
    if len({(work.forward_s.shape[0], work.forward_s.shape[3]) for work in works}) > 1:
        raise SchedulingError(
            "all modules must have the same number of cases and of microbatches, found "
            f"{[(work.forward_s.shape[0], work.forward_s.shape[3]) for work in works]}. Correct the arrays."
        )
    return works


def _bytes(values: npt.ArrayLike | None, name: str, shape: tuple[int, ...]) -> FloatArray | None:
    if values is None:
        return None
    try:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), shape)
    except ValueError as error:
        raise SchedulingError(
            f"{name} must broadcast to the shape of the times {shape}, found {np.shape(values)}. "
            "Give one number per case, replica, stage and microbatch, or fewer axes."
        ) from error


def per_stage(values: npt.ArrayLike, name: str, shape: tuple[int, ...]) -> FloatArray:
    """A field of :class:`StepEnd` with all its axes; raises SchedulingError where it does not fit."""
    array = np.asarray(values, dtype=np.float64)
    try:
        result = np.broadcast_to(array, shape)
    except ValueError as error:
        raise SchedulingError(
            f"{name} must broadcast to (num_cases, num_stages) = {shape}, found {array.shape}. "
            "Give one number, or one per stage."
        ) from error
    if not (np.isfinite(array) & (array >= 0)).all():
        raise SchedulingError(f"{name} must be finite and not negative, found {array.tolist()}. Correct it.")
    return result
