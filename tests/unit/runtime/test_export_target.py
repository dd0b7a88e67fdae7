"""Where an export may go: it replaces what is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop_ds.errors import ConfigError
from dflop_ds.runtime.export import _finish, require_replaceable


def test_new_empty_and_earlier_exports_are_replaced(tmp_path: Path) -> None:
    kept = [tmp_path / "run", tmp_path / "model"]
    require_replaceable(tmp_path / "new", kept)
    (tmp_path / "old").mkdir()
    require_replaceable(tmp_path / "old", kept)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "old" / name).write_text("{}")
    require_replaceable(tmp_path / "old", kept)


def test_nothing_else_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    kept = [tmp_path / "run" / "checkpoints"]
    for out in (tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints", Path("/")):
        with pytest.raises(ConfigError, match=r"found .*checkpoints in"):
            require_replaceable(out, kept)
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"found .*checkpoints in \."):
        require_replaceable(Path("."), kept)
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="link or file"):
            require_replaceable(tmp_path / name, [])
    with pytest.raises(ConfigError, match="other files than a model's"):
        require_replaceable(tmp_path, [])


def test_a_crash_while_an_export_is_replaced_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, unfinished = tmp_path / "out", tmp_path / ".out.unfinished"
    for directory, content in ((out, "old"), (unfinished, "new")):
        directory.mkdir()
        (directory / "config.json").write_text(content)
    writer = SimpleNamespace(directory=unfinished, write_rest=lambda: None)
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self == unfinished:
            raise KeyboardInterrupt
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        _finish(writer, out)
    monkeypatch.undo()
    assert (tmp_path / ".out.earlier" / "config.json").read_text() == "old"
    _finish(writer, out)
    assert (out / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
