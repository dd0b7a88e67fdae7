"""``dflop-ds schedule`` on files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflop_ds.cli.main import main
from dflop_ds.cost.features import ProfileRow
from dflop_ds.profiling.table import Fingerprint, ProfileTable, model_hash
from dflop_ds.shapes import SampleShape, ShapeTable
from tests.support.kinds import TILED_KINDS

CONFIG = {
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": 56,
        "patch_size": 14,
    },
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 256,
    },
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    rng = np.random.default_rng(0)
    shapes = []
    for index in range(64):
        tiles, text = int(rng.integers(0, 6)), int(rng.lognormal(4.0, 1.0)) + 4
        tokens = text + 16 * tiles
        shapes.append(SampleShape(f"id-{index}", tiles, 0, text, tokens, text // 2))
    ShapeTable.from_shapes(shapes).save(tmp_path / "shapes.npz")
    rows = []
    for kind in TILED_KINDS:
        for size in (1, 2, 4, 8):
            counts = (size, 16 * size, 50 * size, 2500 * size, size, 20 * size)
            rows.append(ProfileRow(kind, *counts, 1e-4 * size, 2e-4 * size))
    fingerprint = Fingerprint("cpu", "Some CPU", {"torch": "2"}, "float32", "auto", False, model_hash(CONFIG))
    ProfileTable(rows, fingerprint).save(tmp_path / "profile.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = {"--shapes": "shapes.npz", "--profile": "profile.json", "--model": "config.json"}
    return {option: str(tmp_path / name) for option, name in names.items()}


def _arguments(files: dict[str, str], *more: str) -> list[str]:
    return ["schedule", *(part for pair in files.items() for part in pair), *more]


def test_it_prints_before_and_after(files, capsys) -> None:
    options = ["--num-replicas", "2", "--num-microbatches", "4", "--num-stages", "2", "--time-limit-s", "0.1"]
    assert main(_arguments(files, *options)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("64 samples, 2 replicas x 4 microbatches, 2 stages")
    blind, aware = (float(line.split()[1]) for line in lines[2:4])
    assert aware < blind
    assert "lower bound" in lines[4] and "gap" in lines[4]
    assert lines[-1].startswith("predicted saving: ")


def test_caps_that_cannot_hold_are_explained(files, capsys) -> None:
    options = ["--num-microbatches", "2", "--max-tokens", "2000"]
    assert main(_arguments(files, *options)) == 2
    assert "Use at least" in capsys.readouterr().err


def test_missing_files_are_named(files, capsys) -> None:
    del files["--profile"]
    assert main(_arguments(files)) == 2
    assert "--profile, --num-microbatches" in capsys.readouterr().err


def test_profiles_of_another_model_or_without_a_layer_kind_are_refused(files, capsys) -> None:
    profile = Path(files["--profile"])
    content = json.loads(profile.read_text())
    content["rows"] = [row for row in content["rows"] if row["kind"] != "head"]
    profile.write_text(json.dumps(content))
    assert main(_arguments(files, "--num-replicas", "2", "--num-microbatches", "4")) == 2
    assert "no rows of ['head']" in capsys.readouterr().err
    content["fingerprint"]["model_hash"] = "0" * 64
    profile.write_text(json.dumps(content))
    assert main(_arguments(files, "--num-replicas", "2", "--num-microbatches", "4")) == 2
    assert "must be of this model" in capsys.readouterr().err


def test_an_audit_of_what_is_no_text_is_refused(files, capsys) -> None:
    assert main(["schedule", "--audit", files["--shapes"]]) == 2
    assert "must be a readable file" in capsys.readouterr().err
