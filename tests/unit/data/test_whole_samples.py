"""A sample is used whole or not at all: no limit ever cuts a run of media placeholders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer, LlavaOnevisionForConditionalGeneration

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.probe import probe
from dflop_ds.errors import DataError
from tests.support.model_dirs import write_internvl_model
from tests.support.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl

FAMILIES = ["llava_onevision", "internvl", "qwen2_5_vl"]


@pytest.fixture(scope="module")
def open_data(
    tiny_demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], LlavaDataset]:
    dirs = {"llava_onevision": tiny_demo.model_dir}
    dirs["internvl"] = write_internvl_model(tmp_path_factory.mktemp("internvl"))
    dirs["qwen2_5_vl"] = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen"), tiny_demo.model_dir)
    return lambda family: from_pretrained_dir(
        dirs[family], tiny_demo.train_path, media_root=tiny_demo.media_root
    )


def _num_placeholders(data: LlavaDataset, ids: torch.Tensor) -> int:
    tokens = [placeholder.token_id for placeholder in data.rule.placeholders.values()]
    return int(torch.isin(ids, torch.tensor(tokens)).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_limit_drops_whole_samples(open_data: Callable[[str], LlavaDataset], family: str) -> None:
    """Limits that end inside, right before and right behind the media of each sample."""
    data = open_data(family).without_media()
    samples = [data[index] for index in range(len(data))]
    limits = {len(sample.input_ids) + shift for sample in samples[:3] for shift in (-1, 0)}
    for sample in samples[:3]:
        limits |= {sum(item.num_tokens for item in sample.media) // 2 + 1}
    for limit in sorted(limits):
        fitting = [sample.index for sample in samples if len(sample.input_ids) <= limit]
        if not fitting:
            continue
        found = probe(data, max_tokens=limit, oversized="drop")
        assert found.rows.tolist() == fitting
        assert {dropped.sample_id for dropped in found.dropped} == {
            sample.sample_id for sample in samples if sample.index not in fitting
        }
        for row in fitting:
            kept = data[row]
            assert _num_placeholders(data, kept.input_ids) == sum(item.num_tokens for item in kept.media)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_policy_names_the_sample(open_data: Callable[[str], LlavaDataset], family: str) -> None:
    data = open_data(family)
    longest = max(range(len(data)), key=lambda index: data.shape(index).llm_tokens)
    limit = data.shape(longest).llm_tokens - 1
    with pytest.raises(DataError, match=f"sample '{data.sample_id(longest)}'.*at most {limit} LLM tokens"):
        probe(data.without_media(), max_tokens=limit)


def test_a_tokenizer_saved_with_truncation_does_not_truncate(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    shutil.copytree(tiny_demo.model_dir, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.model_max_length = 8
    tokenizer.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "tokenizer.json").read_text())["truncation"]["max_length"] == 8
    options = {"media_root": tiny_demo.media_root}
    cut = from_pretrained_dir(tmp_path / "model", tiny_demo.train_path, **options)
    whole = from_pretrained_dir(tiny_demo.model_dir, tiny_demo.train_path, **options)
    for index in range(len(whole)):
        assert cut.shape(index) == whole.shape(index)


def test_what_the_model_cannot_take_is_refused_in_the_scan(tiny_demo: DemoPaths, tmp_path: Path) -> None:
    """A strip whose patch map would be shrunk to nothing: transformers fails on it in the forward pass."""
    shutil.copytree(tiny_demo.model_dir, tmp_path / "model")
    for name, changes in {
        "config.json": {"image_grid_pinpoints": [[70, 70 * 40]], "vision_aspect_ratio": "anyres_max_1"},
        "preprocessor_config.json": {"image_grid_pinpoints": [[70, 70 * 40]]},
    }.items():
        path = tmp_path / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    records = []
    for name, size in {"good": (700, 600), "strip": (2, 2000)}.items():
        Image.fromarray(np.zeros((*size, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "ok"}]
        records.append({"id": name, "image": f"{name}.png", "conversations": turns})
    (tmp_path / "records.json").write_text(json.dumps(records))
    data = from_pretrained_dir(tmp_path / "model", tmp_path / "records.json", media_root=tmp_path)
    with pytest.raises(DataError, match=r"\[1\] sample 'strip'.*keep a patch in both directions"):
        probe(data, max_tokens=10_000)
    assert [d.sample_id for d in probe(data, max_tokens=10_000, broken="drop").dropped] == ["strip"]

    config = AutoConfig.from_pretrained(tmp_path / "model")
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    with pytest.raises(RuntimeError, match="should be greater than 0"):
        model.model.pack_image_features(
            [torch.zeros(41, 25, config.text_config.hidden_size)],
            torch.tensor([[2, 2000]]),
            image_newline=model.model.image_newline,
            vision_aspect_ratio="anyres_max_1",
        )
