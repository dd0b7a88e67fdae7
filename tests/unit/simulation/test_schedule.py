import pytest

from dflop_ds.errors import SchedulingError
from dflop_ds.simulation.schedule import Kind, one_f_one_b


def _names(slot):
    return [(each.kind.value, each.buffer_id) for each in slot]


def test_two_stages_by_hand():
    # Two microbatches on the last of two stages: it turns each forward into its backward at once.
    slots = [_names(slot) for slot in one_f_one_b(2, 1, 2)]
    end = [("ReduceTiedGrads", None), ("ReduceGrads", None), ("OptimizerStep", None)]
    assert slots == [
        [],
        [("RecvActivation", 0), ("LoadMicroBatch", 0), ("ForwardPass", 0)],
        [("BackwardPass", 0)],
        [("SendGrad", 0), ("RecvActivation", 1), ("LoadMicroBatch", 1), ("ForwardPass", 1)],
        [("BackwardPass", 1)],
        [("SendGrad", 1), *end],
    ]


@pytest.mark.parametrize("num_stages", [1, 3, 4])
def test_every_send_meets_its_receive_in_the_same_slot(num_stages):
    # Slots are a common clock: what one stage sends in a slot the neighbour receives in that slot.
    streams = [one_f_one_b(num_stages, stage, 5) for stage in range(num_stages)]
    pairs = ((Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, 1), (Kind.SEND_GRAD, Kind.RECV_GRAD, -1))
    for send, receive, step in pairs:
        sent = {
            (slot, stage + step, each.microbatch)
            for stage, stream in enumerate(streams)
            for slot, instructions in enumerate(stream)
            for each in instructions
            if each.kind is send
        }
        received = {
            (slot, stage, each.microbatch)
            for stage, stream in enumerate(streams)
            for slot, instructions in enumerate(stream)
            for each in instructions
            if each.kind is receive
        }
        assert sent == received
        assert len(sent) == 5 * (num_stages - 1)


@pytest.mark.parametrize("arguments", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0)])
def test_bad_counts_are_refused(arguments):
    with pytest.raises(SchedulingError):
        one_f_one_b(*arguments)
