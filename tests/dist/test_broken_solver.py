"""A solver process that is killed or stopped does not stop training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist


def test_training_goes_on_without_its_solver(tiny_demo: Any, tmp_path: Path) -> None:
    block = {"scheduler": {"deterministic_time_s": 0.02, "deadline_s": 0.5, "solver": "process"}}
    first, second = run_ranks(
        "broken_solver", {"config": ds_config(demo_paths(tiny_demo), tmp_path, block)}, tmp_path
    )
    assert first["losses"] == second["losses"]
    assert np.isfinite(first["losses"]).all()
    assert first["started"] >= 2, "the killed process was replaced"
    assert first["fallbacks"] >= 1
    assert first["alive"] == [], "destroy ends even a stopped process"
    assert max(first["times_s"]) < 10.0
