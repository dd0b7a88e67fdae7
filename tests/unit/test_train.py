"""Length of training, what is due when, and the file of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.config import DflopConfig
from dflop_ds.train import MetricsFile, due, must_save, total_steps


def _config(tail: str = "partial", **train: Any) -> DflopConfig:
    return DflopConfig.model_validate({"data": {"tail": tail}, "train": train})


@pytest.mark.parametrize(
    ("tail", "num_epochs", "num_samples", "expected"),
    [
        ("partial", 1.0, 24, 3),
        ("drop", 1.0, 24, 3),
        ("partial", 1.0, 25, 4),
        ("drop", 1.0, 25, 3),
        ("partial", 1.0, 31, 4),
        ("drop", 1.0, 31, 3),
        ("partial", 2.0, 25, 8),
        ("drop", 2.0, 25, 6),
        ("partial", 0.5, 25, 2),
        ("partial", 0.3, 25, 2),  # 1.2 steps: the epoch part is covered
        ("drop", 1.5, 25, 5),  # 4.5
        ("partial", 0.01, 25, 1),
        ("partial", 1.0, 3, 1),
    ],
)
def test_steps_of_epochs(tail: str, num_epochs: float, num_samples: int, expected: int) -> None:
    assert total_steps(_config(tail, num_epochs=num_epochs), num_samples, 8) == expected


def test_whole_numbers_of_steps_are_not_rounded_up() -> None:
    assert total_steps(_config(num_epochs=0.07), 800, 8) == 7


def test_given_steps_are_taken() -> None:
    assert total_steps(_config(num_steps=7), 1000, 8) == 7


@pytest.mark.parametrize(
    ("every", "expected"), [(None, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (5, [5]), (9, [])]
)
def test_due(every: int | None, expected: list[int]) -> None:
    assert [step for step in range(1, 7) if due(every, step)] == expected


@pytest.mark.parametrize(
    ("train", "stopping", "expected"),
    [
        ({"save_every": 2}, False, [2, 4, 5]),
        ({"save_every": 9}, False, [5]),
        ({}, False, []),
        ({}, True, [1, 2, 3, 4, 5]),
        ({"save_every": 2, "save_on_stop": False}, True, [2, 4, 5]),
    ],
)
def test_checkpoints_are_saved(train: dict[str, Any], stopping: bool, expected: list[int]) -> None:
    block = _config(**train).train
    assert [step for step in range(1, 6) if must_save(block, step, step == 5, stopping)] == expected


def test_metrics_are_complete_lines_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    metrics = MetricsFile(path)
    lines = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": 1e-300, "eval_loss": 3.0}]
    for number, line in enumerate(lines, start=1):
        metrics.append(line)
        assert [json.loads(text) for text in path.read_text().splitlines()] == lines[:number]
        assert path.read_text().endswith("\n")


def test_metrics_of_a_resumed_run_go_on_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = [{"step": step, "loss": float(step)} for step in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old) + '{"step": 4, "lo')
    MetricsFile(path, num_kept=2).append({"step": 3, "loss": 9.0})
    kept = [json.loads(text) for text in path.read_text().splitlines()]
    assert kept == [*old[:2], {"step": 3, "loss": 9.0}]
    MetricsFile(path).append({"step": 1, "loss": 8.0})
    assert [json.loads(text) for text in path.read_text().splitlines()] == [{"step": 1, "loss": 8.0}]
