"""The profile table refuses what cannot be learned from."""

import copy
import dataclasses
import json
import logging
import math

import numpy as np
import pytest

from dflop_ds.cost.model import ProfileRow
from dflop_ds.errors import CostModelError
from dflop_ds.profiling.table import Fingerprint, ProfileTable, model_hash

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
        "num_hidden_layers": 2,
        "vocab_size": 256,
    },
}
FINGERPRINT = Fingerprint(
    device="cpu",
    hardware="Some CPU",
    versions={"torch": "2.9.0"},
    dtype="float32",
    attention="sdpa",
    activation_checkpointing=False,
    model_hash=model_hash(CONFIG),
)
ROWS = [
    ProfileRow("vision_block", 3, 0, 0, 0, 0, 0, 1e-3, 2e-3),
    ProfileRow("decoder_block", 0, 0, 100, 5000, 2, 40, 1e-3, 0.1 + 0.2),
]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "profile.json"
    ProfileTable(ROWS, FINGERPRINT).save(path)
    return path


def test_round_trip(saved):
    table = ProfileTable.load(saved)
    assert table.rows == ROWS
    assert table.fingerprint == FINGERPRINT
    assert len(table) == 2


def test_numpy_numbers_round_trip(tmp_path):
    row = dataclasses.replace(ROWS[0], encoder_inputs=np.int64(3), forward_s=np.float64(1e-3))
    ProfileTable([row], FINGERPRINT).save(tmp_path / "numpy.json")
    assert ProfileTable.load(tmp_path / "numpy.json").rows == [ROWS[0]]


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"forward_s": math.nan}, "forward_s, found nan"),
        (0, {"forward_s": math.inf}, "forward_s, found inf"),
        (1, {"backward_s": -1e-9}, "row 1 .decoder_block.*backward_s"),
        (0, {"backward_s": None}, "backward_s, found None"),
        (0, {"encoder_inputs": 0}, "encoder_inputs of at least 1"),
        (1, {"llm_tokens": 0}, "llm_tokens of at least 1"),
        (1, {"num_segments": 0}, "num_segments of at least 1"),
        (1, {"target_tokens": -1}, "target_tokens, found -1"),
        (1, {"llm_tokens": 1.5}, r"llm_tokens, found 1\.5"),
        (1, {"sum_squared_tokens": 10**400}, r"sum_squared_tokens, found 1000000.*\(401 characters\)"),
        (1, {"activation_bytes": 2**53 + 1}, "from 0 to 2.53 as activation_bytes"),
        (0, {"forward_s": 1e308}, r"as forward_s, found 1e\+308"),
        (0, {"forward_s": 5e-324}, "as forward_s, found 5e-324"),
        (1, {"kind": "mlp"}, "layer kind must be one of"),
    ],
)
def test_bad_rows_are_named(index, changes, message):
    rows = list(ROWS)
    rows[index] = dataclasses.replace(rows[index], **changes)
    with pytest.raises(CostModelError, match=message):
        ProfileTable(rows, FINGERPRINT)


def test_empty_table():
    with pytest.raises(CostModelError, match="at least one row"):
        ProfileTable([], FINGERPRINT)


def test_nan_in_a_file(saved):
    saved.write_text(saved.read_text().replace("0.001", "NaN"))
    with pytest.raises(CostModelError, match="found nan"):
        ProfileTable.load(saved)


def test_truncated_file(saved):
    text = saved.read_text()
    for length in (0, 1, len(text) // 2, len(text) - 1):
        saved.write_text(text[:length])
        with pytest.raises(CostModelError, match="readable profile table"):
            ProfileTable.load(saved)


def test_missing_file(tmp_path):
    with pytest.raises(CostModelError, match=r"absent\.json"):
        ProfileTable.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.update(schema_version=99), "Upgrade dflop_ds"),
        (lambda content: content.update(schema_version=1), "Write it again"),
        (lambda content: content.pop("limits"), "limits"),
        (lambda content: content.pop("schema_version"), "found None"),
        (lambda content: content.update(rows=[]), "at least one row"),
        (lambda content: content.update(rows=None), "whole rows"),
        (lambda content: content.pop("rows"), "whole rows"),
        (lambda content: content["rows"][0].pop("kind"), "kind"),
        (lambda content: content["rows"][0].update(kind=["norm"]), "layer kind"),
        (lambda content: content["rows"][0].update(extra=1), "extra"),
        (lambda content: [row.update(forward_s=0.0) for row in content["rows"]], "forward time above 0"),
        (lambda content: content["fingerprint"].pop("dtype"), "dtype"),
        (lambda content: content["fingerprint"].update(versions="2.9"), "versions"),
        (
            lambda content: content["fingerprint"].update(tensor_parallel_degree=0),
            "degree is 0",
        ),
        (lambda content: content.update(parameters={"norm": -1}), "parameters are"),
        (lambda content: content.update(parameters={"norm": math.inf}), "infinity"),
        (
            lambda content: content["fingerprint"].update(activation_checkpointing="no"),
            "activation_checkpointing",
        ),
    ],
)
def test_damaged_file(saved, damage, message):
    content = json.loads(saved.read_text())
    damage(content)
    saved.write_text(json.dumps(content))
    with pytest.raises(CostModelError, match=message):
        ProfileTable.load(saved)


def test_file_that_is_no_object(saved):
    saved.write_text("[1, 2]")
    with pytest.raises(CostModelError, match="found a list"):
        ProfileTable.load(saved)


def test_model_hash_follows_the_dimensions_that_matter():
    deeper, renamed, wider = (copy.deepcopy(CONFIG) for _ in range(3))
    deeper["text_config"]["num_hidden_layers"] = 99
    renamed["_name_or_path"] = "somewhere/else"
    wider["text_config"]["intermediate_size"] = 256
    assert model_hash(deeper) == model_hash(renamed) == model_hash(CONFIG)
    assert model_hash(wider) != model_hash(CONFIG)
    assert len(model_hash(CONFIG)) == 64


def test_other_model_is_refused():
    with pytest.raises(CostModelError, match="must be of this model"):
        ProfileTable(ROWS, FINGERPRINT).check_matches(dataclasses.replace(FINGERPRINT, model_hash="0" * 64))


def test_other_hardware_follows_the_policy(caplog):
    table = ProfileTable(ROWS, FINGERPRINT)
    other = dataclasses.replace(FINGERPRINT, hardware="Other CPU")
    with caplog.at_level(logging.WARNING):
        table.check_matches(FINGERPRINT, "refuse")
        assert not caplog.records
        table.check_matches(other)
    assert "hardware 'Some CPU' instead of 'Other CPU'" in caplog.text
    with pytest.raises(CostModelError, match="Other CPU"):
        table.check_matches(other, "refuse")
    with pytest.raises(CostModelError, match="'ignore'"):
        table.check_matches(other, "ignore")


def test_other_versions_are_only_logged(caplog):
    other = dataclasses.replace(FINGERPRINT, versions={"torch": "2.10.0"})
    with caplog.at_level(logging.INFO):
        ProfileTable(ROWS, FINGERPRINT).check_matches(other, "refuse")
    assert "2.10.0" in caplog.text
