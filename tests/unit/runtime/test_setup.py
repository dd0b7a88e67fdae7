"""Stages, their boundaries and the microbatches that are profiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflop_ds.config import DflopConfig
from dflop_ds.cost.split import configured_boundaries
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import ConfigError
from dflop_ds.profiling.selection import choose_microbatches
from dflop_ds.runtime.setup import resolve_stages
from dflop_ds.shapes import SampleShape, ShapeTable

KINDS = ["vision_embed", "vision_block", "projector", "token_embed", "decoder_block", "norm", "head"]


def _config(**parallel: Any) -> DflopConfig:
    return DflopConfig.model_validate({"parallel": parallel})


@pytest.fixture
def probed() -> ProbedDataset:
    table = ShapeTable.from_shapes(SampleShape(f"s{i}", 1, 0, 10 + i, 20 + i, 5) for i in range(6))
    return ProbedDataset(list(range(6)), table)


@pytest.mark.parametrize(
    ("stages", "world_size", "expected"),
    [("auto", 1, 1), ("auto", 2, 2), (1, 4, 1), (2, 4, 2), (4, 4, 4), (3, 6, 3), (2, 2, 2)],
)
def test_number_of_stages(stages: Any, world_size: int, expected: int) -> None:
    assert resolve_stages(_config(pipeline_stages=stages), world_size) == expected


def test_auto_is_refused_for_more_than_two_ranks() -> None:
    with pytest.raises(ConfigError, match=r'more than 2 ranks, found "auto" for 4.*divisor of 4'):
        resolve_stages(_config(pipeline_stages="auto"), 4)


@pytest.mark.parametrize(("stages", "world_size"), [(2, 1), (2, 3), (4, 6)])
def test_ranks_must_be_a_multiple_of_the_stages(stages: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"found {world_size} ranks for {stages} stages"):
        resolve_stages(_config(pipeline_stages=stages), world_size)


@pytest.mark.parametrize(
    ("split", "expected"), [([7], [0, 7]), ([3, 4], [0, 3, 7]), ([1, 1, 5], [0, 1, 2, 7])]
)
def test_a_list_gives_the_layers_of_each_stage(split: list[int], expected: list[int], probed) -> None:
    config = _config(split=split, pipeline_stages=len(split))
    assert configured_boundaries(config, KINDS, len(split), None, probed.table, 2) == expected


@pytest.mark.parametrize("split", [[3, 3], [3, 5]])
def test_a_list_with_another_sum_is_refused(split: list[int], probed) -> None:
    with pytest.raises(ConfigError, match=rf"all 7 layers, found \{split}.*sum {sum(split)}"):
        configured_boundaries(_config(split=split, pipeline_stages=2), KINDS, 2, None, probed.table, 2)


@pytest.mark.parametrize("split", ["parameters", "uniform"])
def test_the_rules_of_deepspeed_are_left_to_it(split: str, probed) -> None:
    assert configured_boundaries(_config(split=split), KINDS, 2, None, probed.table, 2) is None


class _Times:
    """Layer model with a fixed time per kind, a third of it forward."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds

    def predict(self, kind: str, features: Any) -> tuple[np.ndarray, np.ndarray]:
        total_s = np.full(len(features), self.seconds[kind])
        return total_s / 3, total_s * 2 / 3


def test_auto_balances_predicted_times(probed) -> None:
    kinds = ["vision_embed", "vision_block", "vision_block", "projector", "token_embed", "decoder_block"]
    model = _Times(vision_embed=1, vision_block=4, projector=1, token_embed=1, decoder_block=5)
    # 1 4 4 1 1 5: cut into 9 and 7; into 5, 5 and 6.
    assert configured_boundaries(_config(split="auto"), kinds, 2, model, probed.table, 4) == [0, 3, 6]
    assert configured_boundaries(_config(split="auto"), kinds, 3, model, probed.table, 4) == [0, 2, 4, 6]


def test_auto_needs_a_cost_model(probed) -> None:
    with pytest.raises(ConfigError, match=r'split "auto" needs a cost model'):
        configured_boundaries(_config(split="auto"), KINDS, 2, None, probed.table, 2)


def _table(num_samples: int) -> ShapeTable:
    rng = np.random.default_rng(7)
    shapes = []
    for index in range(num_samples):
        tiles, text = int(rng.integers(0, 10)), int(rng.integers(20, 900))
        shapes.append(SampleShape(str(index), tiles, 0, text, text + 25 * tiles, text // 2))
    return ShapeTable.from_shapes(shapes)


@pytest.mark.parametrize("samples_per_bin", [1, 3, 8])
def test_profiled_microbatches_cover_one_to_twice_the_usual_size(samples_per_bin: int) -> None:
    chosen = choose_microbatches(_table(100), samples_per_bin, 64, seed=3)
    assert len(chosen) == 64
    assert {len(members) for members in chosen} == set(range(1, max(2, 2 * samples_per_bin) + 1))
    rows = [row for members in chosen for row in members]
    assert all(0 <= row < 100 and isinstance(row, int) for row in rows)
    assert len(set(rows)) > 30, "spread over the data set"


def test_profiled_microbatches_of_a_small_data_set() -> None:
    chosen = choose_microbatches(_table(3), 4, 32, seed=0)
    assert {len(members) for members in chosen} == set(range(1, 9)), "samples repeat inside a bin"
    assert {row for members in chosen for row in members} == {0, 1, 2}


def test_profiled_microbatches_depend_on_the_seed_alone() -> None:
    assert choose_microbatches(_table(50), 4, 16, seed=1) == choose_microbatches(_table(50), 4, 16, seed=1)
    assert choose_microbatches(_table(50), 4, 16, seed=1) != choose_microbatches(_table(50), 4, 16, seed=2)


def test_profiled_microbatches_reach_twice_a_large_usual_size() -> None:
    sizes = {len(members) for members in choose_microbatches(_table(1000), 64, 64, seed=0)}
    assert min(sizes) == 1
    assert max(sizes) == 128
