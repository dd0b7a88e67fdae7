"""Every example configuration is valid, and resolves to the sizes that its README states."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from dflop_ds.config import BatchSizes, load_ds_config, parse_dflop, validate_for_pipeline

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
RANKS = {
    "llava_onevision_tiny_cpu.json": 2,
    "qwen2_audio_tiny_cpu.json": 2,
    "llava_onevision_qwen2.5_7b_8gpu.json": 8,
    "llava_onevision_qwen2.5_7b_32gpu.json": 32,
    "llava_onevision_llama3_8b_8gpu.json": 8,
    "internvl3_8b_8gpu.json": 8,
    "qwen2.5_vl_7b_8gpu.json": 8,
    "qwen2_audio_7b_8gpu.json": 8,
}
TRAINER_FILES = sorted(FOLDER.glob("hf_*.json"))
FILES = sorted(set(FOLDER.glob("*.json")) - set(TRAINER_FILES))


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


@pytest.mark.parametrize("path", TRAINER_FILES, ids=lambda path: path.name)
def test_trainer_files_are_filled_in_by_the_trainer_and_documented(path, tmp_path):
    content = json.loads(path.read_text())
    stage = content["zero_optimization"]["stage"]
    assert path.name == f"hf_zero{stage}.json"
    assert "dflop" not in content
    hf_config = HfTrainerDeepSpeedConfig(str(path))
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=2, use_cpu=True
    )
    hf_config.trainer_config_process(arguments)
    hidden = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    hf_config.trainer_config_finalize(arguments, hidden, 10)
    assert "auto" not in json.dumps(hf_config.config)
    assert hf_config.config["train_micro_batch_size_per_gpu"] == 3
    assert f"| `{path.name}` | {stage} |" in (FOLDER / "README.md").read_text()
