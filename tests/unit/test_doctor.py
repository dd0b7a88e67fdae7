"""The doctor's judgements on values, and on folders that are made to look broken."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dflop_ds.errors import EnvironmentProblem
from dflop_ds.runtime import doctor


@pytest.fixture
def locked(tmp_path):
    """Return a function that makes an extensions folder whose lock has a given age."""

    def make(age_s):
        lock = tmp_path / doctor.CPU_OP / "lock"
        lock.parent.mkdir()
        lock.touch()
        made_s = time.time() - age_s
        os.utime(lock, (made_s, made_s))
        return lock

    return make


@pytest.mark.parametrize(
    ("age_s", "compiler", "status"),
    [(1, False, "warn"), (1, True, "warn"), (60, True, "warn"), (60, False, "FAIL"), (3600, True, "FAIL")],
)
def test_lock_is_stale_when_old_or_without_a_compiler(age_s, compiler, status):
    check = doctor.check_lock(Path("/x/op/lock"), age_s, compiler)
    assert check.status == status
    assert "/x/op/lock" in check.detail
    if status == "FAIL":
        assert check.remedy == "Delete the file: rm '/x/op/lock'"


def test_locks_are_found_in_both_layouts(tmp_path):
    for folder in ("op_a", "py311_cpu/op_b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "lock").touch()
    assert [lock.parent.name for lock in doctor.find_locks(tmp_path)] == ["op_a", "op_b"]
    assert doctor.find_locks(tmp_path / "absent") == []


def test_lock_checks_read_the_age_of_the_file(locked, tmp_path):
    lock = locked(3600)
    (check,) = doctor.lock_checks(tmp_path)
    assert check.status == "FAIL"
    assert str(lock) in check.remedy
    lock.unlink()
    (check,) = doctor.lock_checks(tmp_path)
    assert check.status == "ok"


def test_prebuild_never_waits_for_a_stale_lock(locked, tmp_path, monkeypatch):
    lock = locked(3600)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "find_accelerator", lambda: ("cpu", 1))
    with pytest.raises(EnvironmentProblem, match=f"rm '{lock}'"):
        doctor.prebuild_cpu_op(lambda line: None)


def test_prebuild_stops_waiting_when_a_lock_becomes_stale(locked, tmp_path, monkeypatch):
    locked(doctor.IDLE_LOCK_AGE_S - 0.5)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "find_accelerator", lambda: ("cpu", 1))
    monkeypatch.setattr(doctor, "compiler_running", lambda: False)
    lines = []
    with pytest.raises(EnvironmentProblem, match="no compiler is running"):
        doctor.prebuild_cpu_op(lines.append, poll_s=0.05)
    assert len(lines) == 1
    assert "waiting" in lines[0]


def test_prebuild_does_nothing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "find_accelerator", lambda: ("cuda", 8))
    lines = []
    doctor.prebuild_cpu_op(lines.append)
    assert lines == ["the CPU op is not needed with the accelerator 'cuda'"]


@pytest.mark.parametrize(("comm", "alive"), [("cc1plus", True), ("ninja", True), ("python", False)])
def test_compiler_is_found_by_process_name(tmp_path, comm, alive):
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "comm").write_text(f"{comm}\n")
    assert doctor.compiler_running(tmp_path) is alive


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("python", "3.9.2", "FAIL"),
        ("python", "3.13.0", "ok"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.5.1", "FAIL"),
        ("deepspeed", "0.19.2", "FAIL"),
        ("deepspeed", None, "FAIL"),
        ("transformers", "5.0.0", "ok"),
        ("transformers", "4.57.1", "FAIL"),
        ("transformers", "6.0.0", "FAIL"),
    ],
)
def test_versions(name, version, status):
    check = doctor.check_version(name, version)
    assert check.status == status
    assert bool(check.remedy) == (status == "FAIL")


@pytest.mark.parametrize(
    ("size", "status"), [(None, "warn"), (10, "FAIL"), (500, "warn"), (1000, "ok"), (5000, "ok")]
)
def test_space(size, status):
    assert doctor.check_space("disk", size, 1000, 100, "more").status == status


@pytest.mark.parametrize(
    ("name", "count", "status"), [(None, 0, "FAIL"), ("cpu", 1, "ok"), ("cuda", 0, "FAIL"), ("cuda", 8, "ok")]
)
def test_accelerator(name, count, status):
    assert doctor.check_accelerator(name, count).status == status


def test_tools_are_needed_only_where_deepspeed_compiles():
    assert doctor.check_tool("ninja", None, True, "install").status == "FAIL"
    assert doctor.check_tool("ninja", None, False, "install").status == "warn"
    assert doctor.check_tool("ninja", "/usr/bin/ninja", True, "install").status == "ok"


def test_cpu_op(tmp_path):
    assert not doctor.cpu_op_built(tmp_path)
    assert doctor.check_cpu_op(False, True).status == "warn"
    assert doctor.check_cpu_op(False, False).status == "ok"
    built = tmp_path / doctor.CPU_OP / f"{doctor.CPU_OP}.so"
    built.parent.mkdir()
    built.touch()
    assert doctor.cpu_op_built(tmp_path)


def test_extensions_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/some/where")
    assert doctor.extensions_dir() == Path("/some/where")
