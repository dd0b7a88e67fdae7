"""Every example configuration is valid, and resolves to the sizes that its README states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflop_ds.config import BatchSizes, load_ds_config, parse_dflop, validate_for_pipeline

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
RANKS = {
    "llava_onevision_tiny_cpu.json": 2,
    "qwen2_audio_tiny_cpu.json": 2,
    "llava_onevision_qwen2.5_7b_8gpu.json": 8,
    "llava_onevision_qwen2.5_7b_32gpu.json": 32,
    "llava_onevision_llama3_8b_8gpu.json": 8,
}
FILES = sorted(FOLDER.glob("*.json"))


def test_every_file_has_a_known_number_of_ranks():
    assert {path.name for path in FILES} == set(RANKS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_is_valid_and_documented(path):
    ds_config = load_ds_config(path)
    assert ds_config == json.loads(path.read_text())  # plain JSON, for readers other than DeepSpeed
    block = parse_dflop(ds_config)
    validate_for_pipeline(ds_config)
    block.require_training_inputs()
    stages = block.parallel.pipeline_stages
    assert isinstance(stages, int)
    assert RANKS[path.name] % stages == 0
    replicas = RANKS[path.name] // stages
    sizes = BatchSizes.from_ds_config(ds_config, replicas)
    assert sizes.num_microbatches >= 2 * stages  # otherwise the pipeline is mostly idle
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"| `{path.name}`" in line)
    assert f"| {stages} x {replicas} |" in row
    assert (
        f"| {sizes.train_batch_size} = {replicas} x {sizes.num_microbatches} x {sizes.micro_batch_size} |"
        in row
    )
