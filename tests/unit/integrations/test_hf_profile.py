"""Microbatch costs from files: saved ones, and a layer profile turned into four numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dflop_ds import flops
from dflop_ds.cost.features import ProfileRow
from dflop_ds.cost.microbatch_cost import MicrobatchCost
from dflop_ds.errors import CostModelError
from dflop_ds.families import model_dims
from dflop_ds.integrations.hf_profile import load_cost
from dflop_ds.planning.analytic import model_layers
from dflop_ds.profiling.table import Fingerprint, ProfileTable, model_hash
from tests.support.planning import mixed_table
from tests.unit.test_cli_schedule import CONFIG

SPEED = 1e12
DIMS = model_dims(CONFIG)
MODEL = SimpleNamespace(to_dict=lambda: CONFIG)


def layer_flops(kind, inputs, tokens, squares):
    """Forward FLOPs of the two kinds that take nearly all the time; the others take next to none."""
    if kind == "vision_block":
        return flops.vision_block_flops(DIMS.vision, inputs)
    if kind == "decoder_block":
        return flops.decoder_linear_flops(DIMS.llm, tokens) + flops.decoder_attention_flops(DIMS.llm, squares)
    return 1.0 + 0.0 * tokens


def write_profile(path, kinds):
    rng, rows = np.random.default_rng(0), []
    for kind in kinds:
        for _ in range(12):
            inputs, tokens = int(rng.integers(1, 30)), int(rng.integers(200, 9000))
            squares = int(tokens**2 / rng.integers(1, 8))
            time_s = float(layer_flops(kind, *(np.float64(x) for x in (inputs, tokens, squares)))) / SPEED
            rows.append(ProfileRow(kind, inputs, tokens // 2, tokens, squares, 3, 100, time_s, 2 * time_s))
    measured_on = Fingerprint("cuda", "GPU", {}, "bfloat16", "auto", False, model_hash(CONFIG))
    ProfileTable(rows, measured_on).save(path)


def test_a_layer_profile_becomes_the_costs_of_whole_microbatches(tmp_path):
    path, table = tmp_path / "profile.json", mixed_table(64)
    layers = model_layers(DIMS)
    write_profile(path, dict.fromkeys(layers))
    cost = load_cost(path, MODEL, table, 4)
    tokens, inputs = table.llm_tokens.astype(float), table.encoder_inputs.astype(float)
    num_vision, num_llm = layers.count("vision_block"), layers.count("decoder_block")
    expected_s = num_vision * layer_flops("vision_block", inputs, tokens, tokens**2)
    expected_s = expected_s + num_llm * layer_flops("decoder_block", inputs, tokens, tokens**2)
    assert cost.sample_s(tokens, inputs) == pytest.approx(3 * expected_s / SPEED, rel=0.02)


def test_saved_costs_are_read_as_they_are(tmp_path):
    cost = MicrobatchCost(1e-4, 0.0, 2e-3, 0.0)
    cost.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json", MODEL, mixed_table(4), 2) == cost


def test_a_profile_of_other_layers_is_refused(tmp_path):
    write_profile(tmp_path / "profile.json", ["norm", "head"])
    with pytest.raises(CostModelError, match="decoder_block"):
        load_cost(tmp_path / "profile.json", MODEL, mixed_table(4), 2)
