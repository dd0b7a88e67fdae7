"""1F1B pipeline schedules as data, equal to the stream of DeepSpeed's `TrainSchedule`."""

from __future__ import annotations

import dataclasses
import enum

from dflop_ds.errors import SchedulingError


class Kind(enum.Enum):
    """What a pipeline stage is told to do; values are DeepSpeed's instruction names."""

    LOAD_MICRO_BATCH = "LoadMicroBatch"
    FORWARD_PASS = "ForwardPass"
    BACKWARD_PASS = "BackwardPass"
    SEND_ACTIVATION = "SendActivation"
    RECV_ACTIVATION = "RecvActivation"
    SEND_GRAD = "SendGrad"
    RECV_GRAD = "RecvGrad"
    REDUCE_TIED_GRADS = "ReduceTiedGrads"
    REDUCE_GRADS = "ReduceGrads"
    OPTIMIZER_STEP = "OptimizerStep"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a stage.

    Attributes
    ----------
    kind : Kind
    microbatch : int or None
        Microbatch that it works on; None for the reductions and the optimizer step.
    buffer_id : int or None
        Pipeline buffer of that microbatch.
    """

    kind: Kind
    microbatch: int | None = None
    buffer_id: int | None = None


def check_pipeline(num_stages: int, num_microbatches: int) -> None:
    """Raise SchedulingError unless both counts are at least 1."""
    if num_stages < 1 or num_microbatches < 1:
        raise SchedulingError(
            f"a pipeline needs at least 1 stage and 1 microbatch, found {num_stages} and {num_microbatches}. "
            "Correct the plan."
        )


def num_buffers(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Pipeline buffers of a stage: the forwards that it may run ahead, at least 2."""
    return max(2, min(num_stages - stage, num_microbatches))


def forward_slot(stage: int, microbatch: int) -> int:
    """Slot (common clock of all stages) in which a stage runs a forward.

    A forward reaches each further stage one slot later and a stage starts one every second slot.
    """
    return 2 * microbatch + stage


def backward_slot(num_stages: int, stage: int, microbatch: int) -> int:
    """Slot in which a stage runs a backward: as far after the last stage's forward as it lies before."""
    return 2 * (microbatch + num_stages) - 1 - stage


def num_slots(num_stages: int, num_microbatches: int) -> int:
    """Slots of one optimizer step."""
    return 2 * (num_microbatches + num_stages - 1)


def one_f_one_b(num_stages: int, stage: int, num_microbatches: int) -> list[list[Instruction]]:
    """Instructions of one stage for one optimizer step, one list per slot.

    Parameters
    ----------
    num_stages, stage, num_microbatches : int
        `stage` counts from 0.

    Returns
    -------
    list of list of Instruction
        ``num_slots(num_stages, num_microbatches)`` lists, of which some are empty.

    Raises
    ------
    SchedulingError
        If a count is not positive or `stage` is not one of the stages.
    """
    check_pipeline(num_stages, num_microbatches)
    if not 0 <= stage < num_stages:
        raise SchedulingError(f"stage must be in 0..{num_stages - 1}, found {stage}. Correct the caller.")
    slots: list[list[Instruction]] = [[] for _ in range(num_slots(num_stages, num_microbatches))]
    ring = num_buffers(num_stages, stage, num_microbatches)
    has_previous, has_next = stage > 0, stage < num_stages - 1

    def put(slot: int, kind: Kind, microbatch: int) -> None:
        slots[slot].append(Instruction(kind, microbatch, microbatch % ring))

    forwards = [(forward_slot(stage, index), index) for index in range(num_microbatches)]
    backwards = [(backward_slot(num_stages, stage, index), index) for index in range(num_microbatches)]
    # Within a slot DeepSpeed orders the transfers so that neighbours meet: a forward slot first sends the
    # gradient of the slot before, a backward slot first receives its own gradient.
    for slot, index in backwards:
        if has_previous:
            put(slot + 1, Kind.SEND_GRAD, index)
        if has_next:
            put(slot, Kind.RECV_GRAD, index)
    for slot, index in forwards:
        if has_next:
            put(slot + 1, Kind.SEND_ACTIVATION, index)
        if has_previous:
            put(slot, Kind.RECV_ACTIVATION, index)
        if not (has_previous and has_next):
            put(slot, Kind.LOAD_MICRO_BATCH, index)
        put(slot, Kind.FORWARD_PASS, index)
    for slot, index in backwards:
        put(slot, Kind.BACKWARD_PASS, index)
    slots[-1] += [
        Instruction(kind) for kind in (Kind.REDUCE_TIED_GRADS, Kind.REDUCE_GRADS, Kind.OPTIMIZER_STEP)
    ]
    return slots
