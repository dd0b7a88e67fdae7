"""Which stage boundaries are accepted, and which stages pass gradients on."""

from __future__ import annotations

import types

import numpy as np
import pytest

from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.errors import ConfigError
from dflop_ds.runtime.module import DflopPipelineModule, check_boundaries


@pytest.mark.parametrize(
    ("boundaries", "num_layers", "num_stages"),
    [
        ([0, 5], 5, 1),
        ([0, 1, 5], 5, 2),
        ([0, 1, 2, 3], 3, 3),
        ((0, 4, 5), 5, 2),
        (np.array([0, 4, 5]), 5, 2),
    ],
)
def test_rising_boundaries_are_accepted(boundaries, num_layers: int, num_stages: int) -> None:
    found = check_boundaries(boundaries, num_layers, num_stages)
    assert found == list(boundaries)
    assert all(type(bound) is int for bound in found)


@pytest.mark.parametrize(
    "boundaries",
    [
        [],
        [0, 5],  # too few
        [0, 1, 2, 5],  # too many
        [1, 3, 5],  # does not start at 0
        [0, 3, 4],  # leaves a layer out
        [0, 3, 6],  # a layer too many
        [0, 0, 5],  # an empty first stage
        [0, 5, 5],  # an empty last stage
        [0, 6, 5],  # falling
        [0, -1, 5],
    ],
    ids=str,
)
def test_other_boundaries_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(ConfigError, match="must be 3 rising layer indices from 0 to 5") as caught:
        check_boundaries(boundaries, 5, 2)
    assert f"found {boundaries}" in str(caught.value)


def test_gradients_are_wanted_from_the_first_trained_stage_on() -> None:
    frozen, trained = LayerTraining(0.0, False), LayerTraining(0.5, False)
    module = types.SimpleNamespace(stage_training=lambda: [[frozen, frozen], [frozen, trained], [frozen]])
    assert [DflopPipelineModule.trained_up_to(module, stage) for stage in range(3)] == [False, True, True]
    module.stage_training = lambda: None
    assert DflopPipelineModule.trained_up_to(module, 0)
