"""The plan log: what is written can be read, run again and audited."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflop_ds.cli.main import main
from dflop_ds.cost.model import SampleCosts
from dflop_ds.errors import PlanError
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.plan_log import audit, measured_line, plan_line, rank_log, rank_logs, read_plan_log
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.shapes import SampleShape, ShapeTable


@pytest.fixture
def planner() -> StepPlanner:
    tokens = np.random.default_rng(0).integers(10, 1000, 24)
    shapes = (SampleShape(f"id-{i}", 1, 0, int(t), int(t), 1) for i, t in enumerate(tokens))
    times_s = np.stack([tokens, tokens], axis=1) * 1e-3
    return StepPlanner(
        table=ShapeTable.from_shapes(shapes),
        rows=np.arange(24) + 100,
        order=EpochOrder(24, 12, seed=1),
        num_replicas=1,
        num_microbatches=4,
        micro_batch_size=3,
        costs=SampleCosts(times_s, times_s),
        policy="lpt",
        max_tokens="auto",
    )


@pytest.fixture
def lines(planner: StepPlanner) -> list[dict]:
    names = {index + 100: f"id-{index}" for index in range(24)}
    rows = [plan_line(planner.plan(step), names) for step in range(2)]
    rows.append(measured_line(0, stage=0, replica=0, step_time_s=2.5, microbatch_s=[0.5] * 4))
    return json.loads(json.dumps(rows))


def _write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_log_can_be_run_again_and_holds_what_was_promised(planner, lines, tmp_path, capsys) -> None:
    path = _write(tmp_path / "plans.jsonl", lines)
    steps = read_plan_log(path)
    assert [step.plan for step in steps] == [planner.plan(step).plan for step in range(2)]
    for step in steps:
        ids = [f"id-{index - 100}" for members in step.plan.bins for index in members]
        assert [name for names in step.line["sample_ids"] for name in names] == ids
        assert len(step.line["bin_costs_s"]) == 4
    found = audit(steps)
    assert found.problems == ()
    assert (found.num_steps, found.num_samples, found.num_fallbacks) == (2, 24, 0)
    assert found.measured_s == 2.5
    assert found.predicted_s == pytest.approx(steps[0].line["makespan_s"])
    assert main(["schedule", "--audit", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok"


def test_the_audit_finds_repeated_samples_and_broken_caps(lines, tmp_path, capsys) -> None:
    path = _write(tmp_path / "plans.jsonl", lines)
    first, second = read_plan_log(path)
    first.line["limits"]["tokens"]["cap"] = 1
    first.line["sample_ids"][0] = []
    again = second.plan.__class__(**{**vars(first.plan), "step": 1})
    problems = audit([first, type(second)(again, second.line, [])]).problems
    assert any("the cap is 1" in problem for problem in problems)
    assert any("12 samples occur twice" in problem for problem in problems)
    assert any("do not match the bins" in problem for problem in problems)
    lines[0]["limits"]["tokens"]["cap"] = 1
    assert main(["schedule", "--audit", str(_write(path, lines))]) == 1
    assert "FAIL step 0" in capsys.readouterr().out


def test_a_changed_plan_does_not_match_its_digest(lines, tmp_path) -> None:
    lines[0]["bins"][0], lines[0]["bins"][1] = lines[0]["bins"][1], lines[0]["bins"][0]
    with pytest.raises(PlanError, match="digest"):
        read_plan_log(_write(tmp_path / "plans.jsonl", lines))


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"schema_version": 1, "type": "plan"}'])
def test_damaged_lines_are_named(text, tmp_path) -> None:
    path = tmp_path / "plans.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(PlanError, match="line 1 of"):
        read_plan_log(path)


def test_a_missing_log_is_an_explained_error(tmp_path, capsys) -> None:
    assert main(["schedule", "--audit", str(tmp_path / "none.jsonl")]) == 2
    assert "must be a readable file" in capsys.readouterr().err


def test_other_ranks_log_beside_rank_0(lines, tmp_path) -> None:
    path = _write(tmp_path / "my.plans.jsonl", lines)
    assert rank_log(path, 0) == path
    for rank in (1, 12):
        # Step 7 was never planned in this run.
        rows = [
            measured_line(step, stage=rank, replica=0, step_time_s=2.0, microbatch_s=[2.0]) for step in (0, 7)
        ]
        _write(rank_log(path, rank), rows)
    (tmp_path / "my.plans.rankX.jsonl").write_text("not ours")
    assert list(rank_logs(path)) == [1, 12]
    assert [line["stage"] for line in read_plan_log(path)[0].measured] == [0, 1, 12]
