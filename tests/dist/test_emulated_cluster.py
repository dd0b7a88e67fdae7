"""The emulated-cluster benchmark, two ranks and short waits: it runs, and no step beats its own waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import emulated_cluster
from dflop_ds.scheduling.plan_log import audit, read_plan_log

pytestmark = pytest.mark.dist


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    result = tmp_path / "result.json"
    options = ["--layouts", "2x1", "--num-steps", "4", "--pass-s", "0.003", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["x", "--json", str(result), *options])
    assert emulated_cluster.main() == 0
    assert "EMULATED" in capsys.readouterr().out
    content = json.loads(result.read_text())
    assert {"simulation_error_mean", "speedup_over_blind"} <= set(content["summary"])
    assert [run["label"] for run in content["runs"]] == ["2x1 blind", "2x1 aware"]
    for run in content["runs"]:
        # A layer never waits for less than it should: the simulation of the waits alone is a lower bound.
        pairs = zip(run["measured_s"], run["simulated_without_overheads_s"], strict=True)
        assert all(measured_s > least_s > 0 for measured_s, least_s in pairs)
    plans = read_plan_log(tmp_path / "2x1" / "plans.jsonl")
    assert audit(plans).problems == ()
    assert sum(len(members) for members in plans[0].plan.bins) == 64
