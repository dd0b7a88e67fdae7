"""``dflop-ds plan`` on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflop_ds.cli.main import main
from dflop_ds.config import load_ds_config, parse_dflop
from dflop_ds.cost.features import ProfileRow
from dflop_ds.families import model_dims
from dflop_ds.planning.analytic import model_layers, parameter_counts
from dflop_ds.planning.hardware import PRESETS
from dflop_ds.profiling.table import Fingerprint, ProfileTable, model_hash
from tests.support.planning import mixed_table
from tests.unit.test_cli_schedule import CONFIG as MODEL


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A configuration, a model directory and the shapes of its data."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    mixed_table(64).save(tmp_path / "shapes.npz")
    ds_config: dict[str, Any] = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000},
        "dflop": {"model": {"path": str(tmp_path / "model")}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    return tmp_path


def plan(files: Path, *options: str) -> int:
    return main(["plan", str(files / "ds.json"), "--shapes", str(files / "shapes.npz"), *options])


def write_profile(files: Path, degree: int = 1) -> str:
    dims = model_dims(MODEL)
    rows = []
    for kind in dict.fromkeys(model_layers(dims)):
        for size in (1, 2, 4, 8):
            counts = (size, 196 * size, 400 * size, 160000 * size, size, 100 * size)
            rows.append(ProfileRow(kind, *counts, 1e-3 * size, 2e-3 * size, 1000 * size))
    print_of = Fingerprint("cuda", "Some GPU", {}, "bfloat16", "auto", False, model_hash(MODEL), degree)
    path = files / f"profile{degree}.json"
    ProfileTable(rows, print_of, parameters=parameter_counts(dims)).save(path)
    return str(path)


def test_a_plan_is_printed_and_written(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "plan.json"
    assert plan(files, "--gpus", "4", "--out", str(out), "--load-s", "1.0") == 0
    printed = capsys.readouterr().out
    for part in ("unmeasured, data sheet of a100-80g", "lost by", "chosen:", "tokens/s/GPU", "data-blind"):
        assert part in printed
    assert "Megatron-style" in printed
    assert "loader-bound" in printed
    assert "every sample fits" in printed
    content = load_ds_config(out)
    config = parse_dflop(content)
    assert isinstance(config.parallel.split, list)
    assert sum(config.parallel.split) == len(model_layers(model_dims(MODEL)))
    replicas = 4 // len(config.parallel.split)
    parts = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
    assert parts * replicas == content["train_batch_size"] == 16


def test_a_profile_is_used_and_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = write_profile(files)
    out = files / "plan.json"
    assert plan(files, "--gpus", "2", "--profile", profile, "--out", str(out), "--max-stages", "1") == 0
    printed = capsys.readouterr().out
    assert f"profile {profile}" in printed
    assert "unmeasured" not in printed
    assert parse_dflop(load_ds_config(out)).cost.profile == profile
    assert parse_dflop(load_ds_config(out)).parallel.pipeline_stages == 1


def test_all_layouts_are_shown_but_not_written(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "--gpus", "4", "--layouts", "all", "--rows", "40", "--simulations", "0") == 0
    assert " + " in capsys.readouterr().out
    assert plan(files, "--gpus", "4", "--layouts", "all", "--out", str(files / "x.json")) == 2
    assert "--layouts runtime" in capsys.readouterr().err


def test_what_is_missing_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "--gpus", "1", "--gpu-memory-gb", "0.002") == 1
    printed = capsys.readouterr().out
    assert "What is missing" in printed
    assert "fits into 0.0018 GB per GPU" in printed and "0.0018 GB may be used" in printed
    for part in ("memory:", "GPUs:", "a smaller cap:"):
        assert part in printed


def test_what_cannot_be_written_is_found_before_the_search(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in (files, files / "ds.json" / "plan.json"):
        assert plan(files, "--gpus", "4", "--out", str(out)) == 2
        printed = capsys.readouterr()
        assert f"--out must be a file that can be written, found {out}" in printed.err
        assert not printed.out
    new = files / "new" / "plan.json"
    assert plan(files, "--gpus", "1", "--gpu-memory-gb", "0.002", "--out", str(new)) == 1
    assert not new.exists()


def test_wrong_arguments_are_explained(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(files, "--gpus", "4", "--hardware", "tpu") == 2
    assert "a100-80g" in capsys.readouterr().err
    for name, value in (("--gpus", "-4"), ("--batch-size", "0"), ("--seed", "-1"), ("--load-s", "nan")):
        with pytest.raises(SystemExit, match="2"):
            plan(files, "--gpus", "4", name, value)
        assert f"argument {name}: must be a" in capsys.readouterr().err
    assert plan(files, "--gpus", "4", "--headroom", "1.5") == 2
    assert "--headroom" in capsys.readouterr().err
    assert plan(files, "--gpus", "4", "--gpu-memory-gb", "nan") == 2
    assert "--gpu-memory-gb" in capsys.readouterr().err
    profile = Path(write_profile(files))
    content = json.loads(profile.read_text())
    rows = [row for row in content["rows"] if row["kind"] != "head"]
    profile.write_text(json.dumps({**content, "rows": rows}))
    assert plan(files, "--gpus", "4", "--profile", str(profile)) == 2
    assert "no rows of ['head']" in capsys.readouterr().err
    content["fingerprint"]["model_hash"] = "0" * 64
    profile.write_text(json.dumps(content))
    assert plan(files, "--gpus", "4", "--profile", str(profile)) == 2
    assert "another model_hash" in capsys.readouterr().err


def test_wrong_values_in_the_configuration_are_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.loads((files / "ds.json").read_text())
    for change, message in (
        ({"train_batch_size": True}, "train_batch_size True"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size: must be a number"),
        ({"zero_optimization": 1}, "zero_optimization: must be an object"),
    ):
        (files / "ds.json").write_text(json.dumps({**good, **change}))
        assert plan(files, "--gpus", "2") == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("optimizer", "allowed", "stage"), [("AdamW", False, 1), ("SGD", False, 0), ("SGD", True, 1)]
)
def test_a_plan_has_the_zero_stage_that_the_optimizer_takes(
    files: Path, optimizer: str, allowed: bool, stage: int
) -> None:
    good = json.loads((files / "ds.json").read_text())
    change = {"optimizer": {"type": optimizer}, "zero_allow_untested_optimizer": allowed}
    (files / "ds.json").write_text(json.dumps({**good, **change}))
    assert plan(files, "--gpus", "2", "--max-stages", "1", "--out", str(files / "plan.json")) == 0
    assert load_ds_config(files / "plan.json")["zero_optimization"]["stage"] == stage


def test_hardware_without_the_trained_type_needs_a_profile(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(PRESETS["cpu"].model_dump_json())
    content["peak_flops_per_s"] = {"float32": 1e12}
    (files / "hardware.json").write_text(json.dumps(content))
    options = ("--gpus", "2", "--hardware", str(files / "hardware.json"))
    assert plan(files, *options) == 2
    assert "must name bfloat16, in which the model trains, found ['float32']" in capsys.readouterr().err
    assert plan(files, *options, "--profile", write_profile(files)) == 0


def test_a_profile_in_another_type_is_noted(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.loads((files / "ds.json").read_text())
    (files / "ds.json").write_text(json.dumps({**good, "bf16": {"enabled": False}}))
    assert plan(files, "--gpus", "2", "--profile", write_profile(files)) == 0
    assert "layer times are of bfloat16, the configuration trains in float32" in capsys.readouterr().out


def test_profiles_of_several_tensor_degrees(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_profile(files), write_profile(files, 2)
    assert plan(files, "--gpus", "2", "--layouts", "all", "--profile", one, two) == 0
    assert f"profile {one}, {two}, measured on Some GPU" in capsys.readouterr().out
    assert plan(files, "--gpus", "2", "--profile", two) == 2
    assert "a profile of one GPU must be given" in capsys.readouterr().err
    assert plan(files, "--gpus", "2", "--profile", one, one) == 2
    assert "one profile" in capsys.readouterr().err
