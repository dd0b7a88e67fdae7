"""Samples that do not fit, what is missing, and whether balancing pays."""

import numpy as np
import pytest

from dflop_ds.planning.advice import Payoff, oversized_rows, what_is_missing
from dflop_ds.planning.layout import SearchSpace
from dflop_ds.planning.search import search
from dflop_ds.shapes import SampleShape, ShapeTable
from tests.support.planning import mixed_table, small_workload


def test_the_giant_alone_does_not_fit():
    table = mixed_table(32)
    giant = SampleShape("giant", 0, 0, 200_000, 200_000, 100)
    table = ShapeTable.from_shapes([*(table[i] for i in range(32)), giant])
    workload = small_workload(table, 8)
    plan = search(workload, SearchSpace(1), limit_bytes=1e12).best
    assert oversized_rows(workload, plan, 20e9).tolist() == [32]
    assert oversized_rows(workload, plan, 1e12).size == 0


def test_missing_memory_gpus_and_cap_are_named_and_would_do():
    workload = small_workload(mixed_table(64), 16, reduce_bucket_values=0)
    space = SearchSpace(1)
    limit_bytes = 0.9 * search(workload, space, limit_bytes=1.0).least_bytes
    found = search(workload, space, limit_bytes=limit_bytes)
    assert found.best is None
    memory, gpus, cap = what_is_missing(workload, space, found, limit_bytes)
    assert f"{limit_bytes / 1e9:.3g} GB may be used" in memory
    needed = int(gpus.split()[1])
    assert search(workload, SearchSpace(needed), limit_bytes=limit_bytes).best is not None
    assert cap.startswith("a smaller cap")


def test_a_smaller_cap_that_would_do_is_found():
    table = mixed_table(64)
    long = [SampleShape(f"long{i}", 0, 0, 60_000, 60_000, 100) for i in range(3)]
    table = ShapeTable.from_shapes([*(table[i] for i in range(64)), *long])
    workload = small_workload(table, 16, num_batches=8, reduce_bucket_values=0)
    space = SearchSpace(1)
    limit_bytes = 5e9
    found = search(workload, space, limit_bytes=limit_bytes)
    assert found.best is None
    cap = what_is_missing(workload, space, found, limit_bytes)[2]
    tokens = int(cap.split("max_tokens ")[1].split()[0])
    kept = np.flatnonzero(workload.table.llm_tokens <= tokens)
    assert search(workload.with_rows(kept), space, limit_bytes=limit_bytes).best is not None


@pytest.mark.parametrize(
    ("gain", "loader_s", "said"),
    [
        (0.3, None, "balance-bound"),
        (0.3, 5.0, "balance-bound"),
        (0.3, 20.0, "loader-bound"),
        (0.001, 5.0, "will not pay"),
    ],
)
def test_verdicts(gain, loader_s, said):
    assert said in Payoff(gain, loader_s, step_s=10.0).verdict
