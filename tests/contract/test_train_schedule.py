"""Our schedules as data equal the instruction stream of the installed DeepSpeed."""

import pytest

from dflop_ds.simulation.schedule import num_buffers, one_f_one_b

schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_one_f_one_b_equals_train_schedule(num_stages):
    for stage in range(num_stages):
        for num_microbatches in range(1, 10):
            theirs = schedule.TrainSchedule(micro_batches=num_microbatches, stages=num_stages, stage_id=stage)
            expected = [
                [(each.name, each.kwargs.get("buffer_id")) for each in step] for step in theirs.steps()
            ]
            ours = one_f_one_b(num_stages, stage, num_microbatches)
            assert [[(each.kind.value, each.buffer_id) for each in step] for step in ours] == expected
            assert num_buffers(num_stages, stage, num_microbatches) == theirs.num_pipe_buffers()
