"""Adaptive correction in a real run of two replicas, one of which is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist


def test_a_slow_replica_gets_lighter_bins_and_all_ranks_agree(tiny_demo: Any, tmp_path: Path) -> None:
    block = {
        "parallel": {"pipeline_stages": 1},
        "cost": {"profile_budget_s": 2.0, "adaptive": True},
        "scheduler": {"policy": "lpt", "max_tokens_per_microbatch": None, "deadline_s": 60.0}
        | {"max_encoder_inputs_per_microbatch": None},
    }
    config = ds_config(demo_paths(tiny_demo), tmp_path, block, train_batch_size=24)
    first, second = run_ranks("adaptive", {"config": config, "num_steps": 10}, tmp_path)
    assert first["losses"] == second["losses"]
    assert first["state"] == second["state"]
    assert first["restored"] == first["state"]
    slowness = first["slowness"]
    assert slowness[1] > 1.3 * slowness[0]
    assert sum(first["shares"][-3:]) / 3 < first["shares"][0] - 0.05
