"""What a rank decides before it joins the others."""

import os

import pytest
import torch

from dflop_ds.runtime import distributed


@pytest.mark.parametrize(
    ("environment", "num_cores", "expected"),
    [
        ({"LOCAL_SIZE": "2"}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "3"}, 8, 2),
        ({"LOCAL_SIZE": "4"}, 2, 1),
        ({"LOCAL_SIZE": "1"}, 8, None),
        ({}, 8, None),
        ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "3"}, 8, None),
    ],
)
def test_ranks_share_the_cores_of_a_machine(monkeypatch, environment, num_cores, expected):
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    distributed.share_cores()
    assert asked == ([] if expected is None else [expected])
