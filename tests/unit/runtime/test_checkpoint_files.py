"""Names of checkpoints: what is found, and what a crash between any two renames leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflop_ds.cli.main import main
from dflop_ds.errors import ModelError
from dflop_ds.runtime.checkpoint_folder import find, forget_old, publish
from dflop_ds.runtime.saved import SavedCheckpoint


def write(folder: Path, name: str, content: str = "") -> Path:
    directory = folder / name
    directory.mkdir(parents=True)
    (directory / "dflop.json").write_text(content)
    return directory


def test_a_finished_checkpoint_gets_its_name_and_then_latest(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    write(tmp_path, ".saving-one", "1")
    assert find(tmp_path) is None
    publish(tmp_path, "one", save_latest=True)
    assert find(tmp_path) == tmp_path / "one"
    write(tmp_path, ".saving-two", "2")
    publish(tmp_path, "two", save_latest=False)
    assert find(tmp_path) == tmp_path / "one"
    assert find(tmp_path, "two") == tmp_path / "two"
    assert find(tmp_path / "two") == tmp_path / "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    for content in ("old", "new"):
        write(tmp_path, ".saving-one", content)
        publish(tmp_path, "one", save_latest=True)
    assert (tmp_path / "one" / "dflop.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one"]


def test_old_checkpoints_go_and_others_stay(tmp_path: Path) -> None:
    steps = [f"global_step{step}" for step in (2, 4, 10, 12)]
    for name in (*steps, "best", "global_step5x"):
        write(tmp_path, name)
    (tmp_path / "global_step6").mkdir()  # of another program
    (tmp_path / "latest").write_text("global_step10")
    kept = {"best", "global_step5x", "global_step6", "latest"}

    def left() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} - kept

    forget_old(tmp_path, "best", 1)
    assert left() == set(steps)
    forget_old(tmp_path, "global_step10", 2)
    assert left() == {"global_step4", "global_step10", "global_step12"}
    forget_old(tmp_path, "global_step12", 1)
    assert left() == {"global_step10", "global_step12"}, "the latest stays"


@pytest.mark.parametrize("crash", range(4))
def test_a_crash_between_renames_loses_nothing(tmp_path: Path, monkeypatch, crash: int) -> None:
    write(tmp_path, ".saving-one", "old")
    publish(tmp_path, "one", save_latest=True)
    write(tmp_path, ".saving-one", "new")
    renames = 0
    originals = {name: getattr(Path, name) for name in ("rename", "replace")}

    def until_the_crash(name: str):
        def rename(self: Path, target: Path) -> Path:
            nonlocal renames
            renames += 1
            if renames > crash:
                raise KeyboardInterrupt
            return originals[name](self, target)

        return rename

    for name in originals:
        monkeypatch.setattr(Path, name, until_the_crash(name))
    if crash < 3:
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, "one", save_latest=True)
    else:
        publish(tmp_path, "one", save_latest=True)
    monkeypatch.undo()
    found = find(tmp_path)
    assert found is not None
    assert (found / "dflop.json").read_text() == ("old" if crash < 2 else "new")
    write(tmp_path, ".saving-next", "next")
    publish(tmp_path, "next", save_latest=True)
    assert find(tmp_path) == tmp_path / "next"


def test_a_tag_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("gone\n")
    with pytest.raises(ModelError, match="'gone', found none"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "must hold dflop.json"), ("{}", "schema_version 1, found None"), (None, "must hold dflop.json")],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "dflop.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        SavedCheckpoint(tmp_path)


def test_a_rank_file_that_is_missing_is_named(tmp_path: Path, capsys) -> None:
    content = dict.fromkeys(("layout", "position", "plans", "correction", "model", "family_module"))
    content |= {"schema_version": 1, "num_ranks": 1}
    (tmp_path / "dflop.json").write_text(json.dumps(content))
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "must hold dflop-rank00000.json" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "found none" in capsys.readouterr().err
