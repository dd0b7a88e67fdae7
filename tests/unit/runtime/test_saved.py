"""Checkpoint folders as crashes, full disks and people leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflop_ds.errors import EnvironmentProblem, ModelError
from dflop_ds.runtime.checkpoint_folder import find, forget_unfinished, naming_folder
from dflop_ds.runtime.saved import SavedCheckpoint, write_checked
from tests.support.checkpoints import OPTIMIZER, write_checkpoint


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    saved = SavedCheckpoint(write_checkpoint(tmp_path / "global_step4"))
    saved.require_files()
    assert saved.num_steps == 4


@pytest.mark.parametrize("name", ["layer_00-model_states.pt", "mp_rank_00_model_states.pt", OPTIMIZER])
@pytest.mark.parametrize("num_bytes", [None, 0, 100])
def test_missing_and_cut_off_files_are_named(tmp_path: Path, name: str, num_bytes: int | None) -> None:
    path = write_checkpoint(tmp_path / "global_step4") / name
    content = path.read_bytes()
    path.unlink()
    if num_bytes is not None:
        path.write_bytes(content[:num_bytes])
    with pytest.raises(ModelError, match=rf"found \['{name}'\] missing or damaged"):
        SavedCheckpoint(path.parent).require_files()


def test_a_flipped_bit_is_found_wherever_it_matters(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "global_step4")
    path = directory / "layer_00-model_states.pt"
    content = path.read_bytes()
    missed = []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            SavedCheckpoint(directory).require_files(weights_only=True)
            value = SavedCheckpoint(directory).weight(0, "weight")
        except ModelError:
            continue
        missed.append(place)
        assert value.tolist() == [0.0, 0.0], "space between two entries, or a field that nobody reads"
    assert len(missed) < len(content) // 2


def test_readers_share_the_files(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "global_step4")
    for path in directory.glob("*.pt"):
        path.write_bytes(b"")
    found = []
    for reader in range(2):
        with pytest.raises(ModelError) as caught:
            SavedCheckpoint(directory).require_files(reader, 2)
        found.append([path.name for path in directory.glob("*.pt") if path.name in str(caught.value)])
    assert sorted(map(len, found)) == [1, 2]
    assert not set(found[0]) & set(found[1])


def test_a_changed_number_in_a_file_of_ours_is_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "global_step4") / "dflop-rank00000.json"
    write_checked(path, json.loads(path.read_text()))
    assert SavedCheckpoint(path.parent).ranks[0]["num_measured_steps"] == 0
    path.write_text(path.read_text().replace('"num_measured_steps": 0', '"num_measured_steps": 8'))
    with pytest.raises(ModelError, match=r"rank00000\.json must be as it was written"):
        SavedCheckpoint(path.parent)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold dflop.json"),
        ("[]", "must have schema_version 1, found None"),
        ('{"schema_version": 9}', "found 9"),
        ('{"schema_version": 1, "num_ranks": 1}', "found it without .*layout"),
    ],
)
def test_damaged_main_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    directory = write_checkpoint(tmp_path / "global_step4")
    (directory / "dflop.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        SavedCheckpoint(directory)


@pytest.mark.parametrize("content", [b"", b"..", b".", b"\xff\xfe", b"a/b", b"gone"])
def test_a_pointer_to_nowhere_is_refused(tmp_path: Path, content: bytes) -> None:
    write_checkpoint(tmp_path / "global_step4")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(ModelError, match=r"must hold the checkpoint .*, found \['global_step4'\]"):
        find(tmp_path)


def test_a_checkpoint_without_its_main_file_is_not_taken_for_one_of_deepspeed(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "global_step4")
    (tmp_path / "latest").write_text("global_step4")
    (directory / "dflop.json").unlink()
    with pytest.raises(ModelError, match=r"must hold dflop\.json"):
        find(tmp_path)


def test_without_a_pointer_the_longest_trained_is_found(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    for step in (10, 9, 2):
        write_checkpoint(tmp_path / f"global_step{step}", step)
    write_checkpoint(tmp_path / ".saving-global_step12", 12)
    assert find(tmp_path) == tmp_path / "global_step10"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    words = "space for a checkpoint, found unexpected pos 1 vs 2; free"
    with pytest.raises(EnvironmentProblem, match=words), naming_folder(tmp_path):
        raise RuntimeError("unexpected pos 1 vs 2\nC++ frames")
    with pytest.raises(EnvironmentProblem, match=r"found .*No space left"), naming_folder(tmp_path):
        Path("/dev/full").write_text("x")


def test_what_a_killed_save_has_left_goes_before_the_next_one(tmp_path: Path) -> None:
    hidden = (".replaced-global_step4", ".replaced-global_step2", ".saving-global_step6", ".removing-one")
    for name in ("global_step4", *hidden):
        write_checkpoint(tmp_path / name)
    for name in ("latest", ".saving-latest"):
        (tmp_path / name).write_text("global_step4")
    forget_unfinished(tmp_path)
    # The one that was being replaced stays while there is no other of its name.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".replaced-global_step2",
        "global_step4",
        "latest",
    ]


def test_a_damaged_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "global_step4") / "layer_00-model_states.pt"
    for content in (b"", path.read_bytes()[:100], b"no torch file"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"layer_00-.*must be a file that torch has saved"):
            SavedCheckpoint(path.parent).weight(0, "weight")


def test_a_parameter_is_read_from_its_part_of_the_partition(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "global_step4")
    rank = json.loads((directory / "dflop-rank00000.json").read_text())
    # Group 0; from element 2 of the partition; from element 0 of the parameter; 2 elements.
    rank["optimizer"]["parameters"] = {"0.weight": [0, 2, 0, 2]}
    (directory / "dflop-rank00000.json").write_text(json.dumps(rank))
    base = {
        "state": {0: {"step": 5, "exp_avg": torch.tensor([0.0, 0.0, 3.0, 4.0])}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    flat = torch.tensor([9.0, 9.0, 1.0, 2.0])
    content = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flat]}
    torch.save({"optimizer_state_dict": content}, directory / OPTIMIZER)
    found = SavedCheckpoint(directory).parameter("0.weight")
    assert found is not None
    assert found.master is not None
    assert found.master.tolist() == [1.0, 2.0]
    assert found.state["exp_avg"].tolist() == [3.0, 4.0]
    assert found.state["step"] == 5
    assert found.options == {"lr": 0.1}
