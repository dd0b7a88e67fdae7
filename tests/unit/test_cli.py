"""`dflop-ds`: exit codes, what goes to which stream, and that problems never show a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from dflop_ds.cli.main import VERBS, main
from dflop_ds.errors import DataError
from dflop_ds.runtime import doctor


@pytest.fixture
def write(tmp_path):
    def to_file(content):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(content))
        return str(path)

    return to_file


def test_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert "scheduler" in json.loads(capsys.readouterr().out)["properties"]


def test_check_accepts_a_good_file(write, capsys):
    path = write({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "dflop": {}})
    assert main(["config", "check", path]) == 0
    out = capsys.readouterr().out
    assert "32 samples = 1 replicas x 16 microbatches x 2 samples" in out
    assert "give --num-ranks" in out
    assert out.endswith(f"{path}: ok\n")


def test_check_uses_the_number_of_ranks(write, capsys):
    path = write(
        {
            "train_batch_size": 32,
            "gradient_accumulation_steps": 4,
            "dflop": {"parallel": {"pipeline_stages": 2}},
        }
    )
    assert main(["config", "check", path, "--num-ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "32 samples = 4 replicas x 4 microbatches x 2 samples" in out
    assert "give --num-ranks" not in out
    assert main(["config", "check", path, "--num-ranks", "7"]) == 2
    assert "multiple of the 2 pipeline stages, found 7" in capsys.readouterr().err


def test_check_finds_the_replicas_when_all_sizes_are_given(write, capsys):
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert main(["config", "check", write(sizes)]) == 0
    out = capsys.readouterr().out
    assert "32 samples = 4 replicas" in out
    assert "not enabled" in out
    assert main(["config", "check", write({**sizes, "train_batch_size": 33})]) == 2


def test_check_explains_a_bad_file_on_stderr(write, capsys):
    assert main(["config", "check", write({"train_batch_size": 8, "dflop": {"sed": 1}})]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dflop-ds: dflop.sed: unknown key")
    assert "Traceback" not in captured.err


def test_check_for_the_trainer_skips_the_pipeline_rules(write):
    path = write({"train_batch_size": "auto", "zero_optimization": {"stage": 3}, "dflop": {}})
    assert main(["config", "check", path]) == 2
    assert main(["config", "check", path, "--trainer"]) == 0


def test_check_names_the_trainer_option_for_files_without_a_block(write, capsys):
    path = write({"train_batch_size": "auto", "zero_optimization": {"stage": 3}})
    assert main(["config", "check", path]) == 2
    assert "--trainer" in capsys.readouterr().err
    assert main(["config", "check", path, "--trainer"]) == 0
    assert "not enabled" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["config"], ["nonsense"], ["demo-data"], ["config", "check"]])
def test_wrong_command_lines_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: dflop-ds" in capsys.readouterr().err


def test_a_verb_imports_no_other_one():
    code = (
        "import sys; from dflop_ds.cli.main import build_parser; build_parser('doctor'); "
        "assert not {'numpy', 'pydantic', 'dflop_ds.cli.plan'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_help(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert VERBS[verb] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("FAIL", 1)])
def test_doctor_exit_code(monkeypatch, capsys, status, code):
    check = doctor.Check("ninja", status, "not found", "install it")
    monkeypatch.setattr(doctor, "examine", lambda: [check])
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[0].split() == [status, "ninja", "not", "found"]


@pytest.mark.parametrize(("status", "expected"), [("ok", 1), ("FAIL", 0)])
def test_doctor_prebuilds_only_on_a_sound_machine(monkeypatch, status, expected):
    calls = []
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Check("ninja", status, "")])
    monkeypatch.setattr(doctor, "prebuild_cpu_op", calls.append)
    main(["doctor", "--prebuild"])
    assert len(calls) == expected


def test_demo_data_passes_its_arguments(monkeypatch, tmp_path, capsys):
    calls = []
    fake = types.ModuleType("dflop_ds.data.demo")
    fake.build_demo = lambda out, **options: calls.append((out, options))
    monkeypatch.setitem(sys.modules, "dflop_ds.data.demo", fake)
    assert main(["demo-data", "--out", str(tmp_path), "--num-samples", "5", "--seed", "7"]) == 0
    assert calls == [(tmp_path, {"num_samples": 5, "seed": 7})]
    assert str(tmp_path) in capsys.readouterr().out


def test_demo_data_of_recordings(monkeypatch, tmp_path):
    calls = []
    fake = types.ModuleType("dflop_ds.data.demo_audio")
    fake.build_audio_demo = lambda out, **options: calls.append((out, options))
    monkeypatch.setitem(sys.modules, "dflop_ds.data.demo_audio", fake)
    assert main(["demo-data", "--out", str(tmp_path), "--num-samples", "5", "--media", "audio"]) == 0
    assert calls == [(tmp_path, {"num_samples": 5, "seed": 0})]


def test_errors_of_ours_show_no_traceback(monkeypatch, tmp_path, capsys):
    def broken(out, **options):
        raise DataError("a disk must have room, found none. Free some.")

    fake = types.ModuleType("dflop_ds.data.demo")
    fake.build_demo = broken
    monkeypatch.setitem(sys.modules, "dflop_ds.data.demo", fake)
    assert main(["demo-data", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "dflop-ds: a disk must have room, found none. Free some.\n"


def test_number_of_samples_must_be_positive(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["demo-data", "--out", str(tmp_path), "--num-samples", "0"])
    assert "must be a whole number of at least 1, found '0'" in capsys.readouterr().err
