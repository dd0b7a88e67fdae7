"""`dflop-ds profile`: shapes, a profile and its error report, through the command line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dflop_ds.cli.main import main
from dflop_ds.data.demo import build_demo
from dflop_ds.data.demo_model import TinyModelDims
from dflop_ds.profiling.partial import PartialProfile
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.shapes import ShapeTable
from tests.support.kinds import NATIVE_KINDS
from tests.support.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    dims = TinyModelDims(vision_hidden=16, vision_layers=2, text_hidden=24, text_layers=2, text_heads=3)
    dims = TinyModelDims(**{**vars(dims), "text_kv_heads": 1, "text_intermediate": 32})
    paths = build_demo(folder, num_samples=24, seed=2, dims=dims)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "dflop": {
            "model": {"path": str(paths.model_dir)},
            "data": {"train_path": str(paths.train_path)},
            "train": {"num_steps": 1},
        },
    }
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return str(path), paths


def test_shapes_are_written_summarised_and_kept(demo, tmp_path, capsys, monkeypatch):
    out = tmp_path / "shapes.npz"
    assert main(["profile", "data", demo[0], "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "llm_tokens" in printed
    assert len(ShapeTable.load(out)) == 24
    assert (tmp_path / "shapes.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("dflop_ds.data.dataset.LlavaDataset.shape", lambda *_: pytest.fail("read again"))
    assert main(["profile", "data", demo[0], "--out", str(out)]) == 0


def test_broken_files_are_listed(demo, tmp_path, capsys):
    config = json.loads(Path(demo[0]).read_text())
    records = [json.loads(line) for line in demo[1].train_path.read_text().splitlines()]
    bad = next(record for record in records if isinstance(record.get("image"), str))
    bad["image"] = "absent.jpg"
    path = demo[1].train_path.with_name("with_bad.jsonl")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config["dflop"]["data"]["train_path"] = str(path)
    (tmp_path / "ds.json").write_text(json.dumps(config))
    out = tmp_path / "shapes.npz"
    assert main(["profile", "data", str(tmp_path / "ds.json"), "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "1 samples cannot be used" in printed
    assert "absent.jpg" in printed
    assert len(ShapeTable.load(out)) == 23


def test_unusable_outputs_are_found_before_any_work(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflop_ds.runtime.setup.profile_data", lambda *_: pytest.fail("scanned"))
    monkeypatch.setattr("dflop_ds.runtime.setup.profile_model", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    for subject in ("data", "model"):
        for out in (tmp_path, tmp_path / "file" / "out.npz"):
            assert main(["profile", subject, demo[0], "--out", str(out)]) == 2
            assert str(tmp_path) in capsys.readouterr().err
    assert main(["profile", "data", demo[0], "--out", str(tmp_path / "shapes.png")]) == 2
    assert "end it in .npz" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_leaves_what_was_measured(demo, tmp_path, capsys, monkeypatch):
    out, partial = tmp_path / "profile.json", tmp_path / "profile.json.partial.jsonl"
    keep = PartialProfile.append

    def interrupt(self, number, *found):
        keep(self, number, *found)
        if number == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartialProfile, "append", interrupt)
        assert main(["profile", "model", demo[0], "--out", str(out)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not out.exists()
    kept = [row for line in partial.read_text().splitlines()[1:] for row in json.loads(line)["rows"]]
    assert main(["profile", "model", demo[0], "--out", str(out), "--budget-s", "0.1"]) == 0
    assert json.loads(out.read_text())["rows"][: len(kept)] == kept
    assert not partial.exists()


def test_profile_and_report(demo, tmp_path, capsys, caplog):
    out = tmp_path / "profile.json"
    assert main(["profile", "model", demo[0], "--out", str(out), "--budget-s", "60"]) == 0
    assert not list(tmp_path.glob("*.partial.jsonl"))
    capsys.readouterr()
    png = tmp_path / "scatter.png"
    with caplog.at_level(logging.WARNING):
        assert main(["profile", "report", demo[0], "--profile", str(out), "--png", str(png)]) == 0
    printed = capsys.readouterr().out
    for text in ("stage 0", "stage 1", "decoder_block", "throughput interpolation", "p90 holds"):
        assert text in printed
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_encoder_of_native_resolution_is_profiled(demo, tmp_path, capsys):
    """Patches and attention sums are in shapes and profile; the report and `schedule` take both."""
    model_dir = write_tiny_qwen2_5_vl(tmp_path / "model", demo[1].model_dir)
    config = json.loads(Path(demo[0]).read_text())
    config["dflop"]["model"]["path"] = str(model_dir)
    (tmp_path / "ds.json").write_text(json.dumps(config))
    ds_json, shapes, out = str(tmp_path / "ds.json"), tmp_path / "shapes.npz", tmp_path / "profile.json"
    assert main(["profile", "data", ds_json, "--out", str(shapes)]) == 0
    table = ShapeTable.load(shapes)
    assert (table.encoder_inputs == table.num_patches).all()
    assert table.num_patches.sum() == 4 * (table.llm_tokens - table.text_tokens).sum()
    assert main(["profile", "model", ds_json, "--out", str(out), "--budget-s", "0.1"]) == 0
    rows = ProfileTable.load(out).rows
    assert {row.kind for row in rows} == set(NATIVE_KINDS)
    assert all(row.sum_squared_windows <= row.sum_squared_frames for row in rows)
    files = ["--shapes", str(shapes), "--profile", str(out), "--model", str(model_dir / "config.json")]
    assert main(["schedule", *files, "--num-microbatches", "4", "--num-stages", "2"]) == 0
    assert "predicted saving" in capsys.readouterr().out


def test_the_profile_of_another_model_is_refused(demo, tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert main(["profile", "model", demo[0], "--out", str(out), "--budget-s", "0.1"]) == 0
    content = json.loads(out.read_text())
    content["fingerprint"]["model_hash"] = "0" * 64
    out.write_text(json.dumps(content))
    assert main(["profile", "report", demo[0], "--profile", str(out)]) == 2
    assert "must be of this model" in capsys.readouterr().err


def test_a_profile_of_other_hardware_follows_the_policy(demo, tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert main(["profile", "model", demo[0], "--out", str(out), "--budget-s", "0.1"]) == 0
    content = json.loads(out.read_text())
    content["fingerprint"]["hardware"] = "abacus"
    out.write_text(json.dumps(content))
    config = json.loads(Path(demo[0]).read_text())
    config["dflop"]["cost"] = {"on_other_conditions": "refuse"}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert main(["profile", "report", str(tmp_path / "ds.json"), "--profile", str(out)]) == 2
    assert "hardware 'abacus'" in capsys.readouterr().err
