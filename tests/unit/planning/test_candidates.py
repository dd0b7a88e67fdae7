"""The search space, against plain loops over all degrees."""

import itertools

import pytest

from dflop_ds.errors import ConfigError
from dflop_ds.planning.candidates import enumerate_layouts
from dflop_ds.planning.layout import Degrees, Layout, SearchSpace
from dflop_ds.planning.stages import StageTable
from tests.support.planning import DIMS, small_workload


def brute_force(num_gpus: int, batch_size: int, max_tensor: int, separate: bool) -> set[Layout]:
    """All layouts by trying every number for every degree."""
    degrees = [
        Degrees(t, p, d)
        for t in (1, 2, 4, 8)
        for p in range(1, num_gpus + 1)
        for d in range(1, num_gpus // (t * p) + 1)
        if t <= max_tensor and batch_size % d == 0
    ]
    encoders, llms = DIMS.vision.num_layers + 2, DIMS.llm.num_layers + 3
    pairs: list[tuple[Degrees | None, Degrees]] = []
    for llm in degrees:
        fits = DIMS.llm.num_heads % llm.tensor == 0 and DIMS.llm.num_kv_heads % llm.tensor == 0
        if llm.num_gpus == num_gpus and fits and DIMS.vision.num_heads % llm.tensor == 0:
            pairs += [(None, llm)] if llm.pipeline <= encoders + llms else []
        for encoder in degrees if separate and fits and llm.pipeline <= llms else []:
            related = encoder.data % llm.data == 0 or llm.data % encoder.data == 0
            if encoder.num_gpus + llm.num_gpus == num_gpus and encoder.pipeline <= encoders and related:
                pairs += [(encoder, llm)] if DIMS.vision.num_heads % encoder.tensor == 0 else []
    return {
        Layout(encoder, llm, count, checkpointing, zero)
        for encoder, llm in pairs
        for count in range(1, batch_size + 1)
        for checkpointing, zero in itertools.product((False, True), (0, 1))
        if batch_size % (llm.data * count) == 0
    }


@pytest.mark.parametrize(("num_gpus", "batch_size"), [(1, 4), (4, 8), (6, 12), (7, 14), (8, 8)])
@pytest.mark.parametrize(("max_tensor", "separate"), [(1, False), (1, True), (8, True)])
def test_every_layout_is_found_once(num_gpus, batch_size, max_tensor, separate):
    stages = StageTable(small_workload(batch_size=batch_size))
    kinds = ("uniform", "separate") if separate else ("uniform",)
    candidates = enumerate_layouts(stages, SearchSpace(num_gpus, kinds, max_tensor))
    found = [candidates.layout(index) for index in range(len(candidates))]
    assert len(set(found)) == len(found)
    assert set(found) == brute_force(num_gpus, batch_size, max_tensor, separate)


def test_limits_of_stages_and_microbatches_hold():
    stages = StageTable(small_workload(batch_size=16))
    space = SearchSpace(8, min_stages=2, max_stages=4, num_microbatches=(4,), zero_stages=(1,))
    candidates = enumerate_layouts(stages, space)
    assert set(candidates.llm[:, 1].tolist()) == {2, 4}
    assert set(candidates.num_microbatches.tolist()) == {4}
    assert set(candidates.zero_stage.tolist()) == {1}


def test_nothing_to_find_names_what_does_not_divide():
    stages = StageTable(small_workload(batch_size=16))
    with pytest.raises(ConfigError, match=r"17 GPUs and .* batch of 16 .* uniform with 1 to 4 stages"):
        enumerate_layouts(stages, SearchSpace(17, max_stages=4))
