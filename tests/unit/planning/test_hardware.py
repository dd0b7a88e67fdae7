"""Presets and hardware files."""

import json

import pytest

from dflop_ds.errors import ConfigError, CostModelError
from dflop_ds.planning.hardware import PRESETS, load_hardware


def test_presets_hold_the_figures_of_the_data_sheets():
    assert set(PRESETS) == {"a100-80g", "h100-80g", "h200", "cpu"}
    assert PRESETS["a100-80g"].peak_flops_per_s["bfloat16"] == 312e12
    assert PRESETS["h100-80g"].peak_flops_per_s["bfloat16"] == 989e12
    assert PRESETS["h200"].memory_bytes == 141e9
    assert all(name == hardware.name for name, hardware in PRESETS.items())


def test_a_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(PRESETS["h200"].model_dump_json())
    assert load_hardware(path) == PRESETS["h200"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"memory_byte": 1.0}, "memory_byte"),
        ({"gpus_per_node": 0}, "gpus_per_node"),
        ({"intra_node_bytes_per_s": -1.0}, "intra_node_bytes_per_s"),
        ({"matmul_share": 1.5}, "matmul_share"),
        ({"name": None}, "name"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, named):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**json.loads(PRESETS["h200"].model_dump_json()), **change}))
    with pytest.raises(ConfigError, match=named):
        load_hardware(path)


def test_another_schema_and_an_unknown_name_are_refused(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**json.loads(PRESETS["h200"].model_dump_json()), "schema_version": 9}))
    with pytest.raises(CostModelError, match="schema_version 1"):
        load_hardware(path)
    with pytest.raises(ConfigError, match="a100-80g"):
        load_hardware("b9000")
