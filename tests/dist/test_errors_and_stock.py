"""Errors reach every rank before training; a disabled dflop is stock DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import demo_paths, ds_config

pytestmark = pytest.mark.dist


@pytest.mark.compat
def test_disabled_is_stock(tiny_demo: Any, tmp_path: Path) -> None:
    config = ds_config(demo_paths(tiny_demo), tmp_path, {"enabled": False})
    for rank in run_ranks("stock", {"config": config}, tmp_path):
        assert rank["types"][0] == rank["types"][1] == [True, True]
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["losses"][0][0] != rank["losses"][0][1]


def broken_image(demo: dict[str, str], root: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in Path(demo["train_path"]).read_text().splitlines()]
    (root / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    bad = {
        **next(r for r in records if isinstance(r.get("image"), str)),
        "id": "bad-one",
        "image": str(root / "cut.jpg"),
    }
    (root / "train.jsonl").write_text("\n".join(json.dumps(r) for r in [*records, bad]))
    return ds_config(demo | {"train_path": str(root / "train.jsonl")}, root)


def unknown_key(demo: dict[str, str], root: Path) -> dict[str, Any]:
    return ds_config(demo, root, {"scheduler": {"polcy": "lpt"}})


def zero_two(demo: dict[str, str], root: Path) -> dict[str, Any]:
    return ds_config(demo, root, zero_optimization={"stage": 2})


def bad_split(demo: dict[str, str], root: Path) -> dict[str, Any]:
    return ds_config(demo, root, {"parallel": {"pipeline_stages": 2, "split": [3, 3]}})


def impossible_cap(demo: dict[str, str], root: Path) -> dict[str, Any]:
    return ds_config(demo, root, {"scheduler": {"max_tokens_per_microbatch": 40}})


def nothing_supervised(demo: dict[str, str], root: Path) -> dict[str, Any]:
    records = [{"id": str(n), "conversations": [{"from": "human", "value": "Hello?"}]} for n in range(8)]
    (root / "train.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return ds_config(demo | {"train_path": str(root / "train.jsonl")}, root)


def unwritable_trace(demo: dict[str, str], root: Path) -> dict[str, Any]:
    return ds_config(demo, root, {"telemetry": {"trace": "/proc/nowhere/trace.json"}})


ERRORS = {
    nothing_supervised: ["supervised tokens", "found none in 8 samples"],
    unwritable_trace: ["dflop.telemetry.trace", "/proc/nowhere"],
    broken_image: ["bad-one", "cut.jpg"],
    unknown_key: ["polcy", "policy"],
    zero_two: ["zero_optimization.stage", "0 or 1"],
    bad_split: ["dflop.parallel.split", "[3, 3]"],
    impossible_cap: ["demo-", "40"],
}


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: make.__name__)
def test_error_on_every_rank(make: Any, tiny_demo: Any, tmp_path: Path) -> None:
    config = make(demo_paths(tiny_demo), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    run_ranks("entry", {"config_path": str(path)}, tmp_path, expect=2, timeout_s=90)
    for rank in range(2):
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert "Traceback" not in log
        for text in ERRORS[make]:
            assert text in log


def test_broken_sample_is_dropped_on_every_rank(tiny_demo: Any, tmp_path: Path) -> None:
    config = broken_image(demo_paths(tiny_demo), tmp_path)
    config["dflop"]["data"]["broken"] = "drop"
    config["train_batch_size"] = 12
    reports = run_ranks("trajectory", {"config": config, "num_steps": 2}, tmp_path)
    for rank in reports:
        seen = [index for bins in rank["plans"] for members in bins for index in members]
        assert sorted(seen) == list(range(24))
    assert "bad-one" in (tmp_path / "rank0.log").read_text()


def test_mixed_up_samples_are_noticed(tiny_demo: Any, tmp_path: Path) -> None:
    """Rank 1 loads other samples than planned; it must refuse, and nothing may hang for long."""
    config = ds_config(demo_paths(tiny_demo), tmp_path, {"scheduler": {"policy": "blind"}})
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks("mixed_up", {"config": config}, tmp_path, timeout_s=90)
    assert "as planned, found" in (tmp_path / "rank1.log").read_text()
