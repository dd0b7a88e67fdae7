"""Fixtures that several test folders share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from dflop_ds.data.demo import DemoPaths

# A busy machine may take any time for an example.
settings.register_profile("dflop_ds", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dflop_ds")


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    """Demo data of 24 samples and a tiny model with random weights; do not write into it."""
    # Imported here: tests of pure decisions need no torch.
    from dflop_ds.data.demo import build_demo
    from tests.support.tiny import TINY_DIMS

    return build_demo(tmp_path_factory.mktemp("tiny_demo"), num_samples=24, dims=TINY_DIMS, with_weights=True)
