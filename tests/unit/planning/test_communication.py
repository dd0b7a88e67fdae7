"""Placement of ranks and what it costs."""

import numpy as np
import pytest

from dflop_ds.planning.communication import node_links, optimizer_s, reduce_s, stage_links
from dflop_ds.planning.hardware import PRESETS
from dflop_ds.planning.layout import Degrees, Layout

A100 = PRESETS["a100-80g"]
INTRA, INTER = node_links(A100)


@pytest.mark.parametrize(
    ("encoder", "llm", "expected"),
    [
        (None, (1, 4, 2), [INTRA, INTRA, INTRA]),  # one node
        (None, (1, 4, 4), [INTRA, INTER, INTRA]),  # two stages on each of two nodes
        (None, (2, 2, 4), [INTER]),  # a node per stage
        (None, (1, 2, 12), [INTER]),  # stages of a node and a half
        ((1, 1, 4), (4, 1, 1), [INTRA]),
        ((1, 1, 8), (4, 2, 2), [INTER, INTER]),
    ],
)
def test_neighbours_on_another_node_use_the_network(encoder, llm, expected):
    first = None if encoder is None else Degrees(*encoder)
    assert stage_links(A100, Layout(first, Degrees(*llm), 4, False, 0)) == expected


def test_replicas_reduce_inside_a_node_if_they_fit():
    size = np.array([1e9, 1e9, 1e9])
    near, far, alone = reduce_s(A100, np.array([1, 2, 8]), np.array([8, 8, 1]), size)
    assert near == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 2 * 7 / 8 * 1e9 / 300e9)
    assert far == pytest.approx(8.4e-6 + 14 * 14e-6 + 2 * 7 / 8 * 1e9 / 25e9)
    assert alone == 0.0


def test_zero_divides_the_optimizer_step():
    parameters = np.array([1e9, 1e9])
    whole, share = optimizer_s(A100, parameters, np.array([4, 4]), np.array([0, 1]))
    assert whole == pytest.approx(1e9 * 28 / 2.039e12)
    assert share == pytest.approx(whole / 4)
