"""Pictures of steps."""

from __future__ import annotations

from pathlib import Path

from dflop_ds.cli.timeline import draw_timeline, slowest_replicas
from dflop_ds.simulation.trace import TraceEvent


def events(num_replicas: int, num_stages: int) -> list[TraceEvent]:
    """One forward per rank; replicas with a higher number end later."""
    return [
        TraceEvent("forward 0", stage, replica, 0, 0.1 * stage, 1.0 + replica)
        for replica in range(num_replicas)
        for stage in range(num_stages)
    ]


def test_the_slowest_replicas_are_drawn_where_there_are_many(tmp_path: Path) -> None:
    assert slowest_replicas(events(8, 4)) == set(range(8))
    many = events(1000, 8)
    shown = slowest_replicas(many)
    assert shown == set(range(1000 - len(shown), 1000))
    assert 0 < len(shown) * 8 <= 1000
    draw_timeline(tmp_path / "step.png", many, "predicted")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert len(slowest_replicas(events(2, 500))) == 1
