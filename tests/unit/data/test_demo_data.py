"""The demo data: the same every time, and of the promised variety."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from dflop_ds.data.dataset import from_pretrained_dir
from dflop_ds.data.demo import build_demo
from dflop_ds.data.media import clip_info, load_frames
from dflop_ds.errors import ConfigError


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        build_demo(tmp_path / name, num_samples=12, seed=3)
    build_demo(tmp_path / "third", num_samples=12, seed=4)
    first, second = _files(tmp_path / "first"), _files(tmp_path / "second")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name] and not name.endswith(".mp4")] == []
    for name in (name for name in first if name.endswith(".mp4")):
        infos = [clip_info(tmp_path / folder / name) for folder in ("first", "second")]
        assert infos[0] == infos[1]
        every = list(range(infos[0].num_frames))
        frames = [load_frames(tmp_path / folder / name, every) for folder in ("first", "second")]
        assert max(np.abs(a.astype(int) - b).max() for a, b in zip(*frames, strict=True)) <= 8
    assert first["data/train.jsonl"] != _files(tmp_path / "third")["data/train.jsonl"]


@pytest.fixture(scope="module")
def full_demo(tmp_path_factory: pytest.TempPathFactory):
    return build_demo(tmp_path_factory.mktemp("full_demo"))


def test_mix_of_samples(full_demo) -> None:
    records = [json.loads(line) for line in full_demo.train_path.read_text().splitlines()]
    kinds = Counter("clip" if "video" in record else type(record.get("image")).__name__ for record in records)
    assert kinds == {"str": 115, "list": 38, "clip": 38, "NoneType": 65}
    texts = [
        sum(len(turn["value"].split()) for turn in record["conversations"])
        for record in records
        if "image" not in record and "video" not in record
    ]
    assert 18 <= min(texts) <= 40
    assert 400 <= max(texts) <= 702
    answers = [len(turn["value"].split()) for record in records for turn in record["conversations"][1::2]]
    assert min(answers) == 1
    placeholders = Counter(
        record["conversations"][0]["value"].split("\n")[0] for record in records if "video" in record
    )
    assert set(placeholders) == {"<image>", "<video>"}


def test_variety_of_images(full_demo) -> None:
    modes: Counter[str] = Counter()
    ratios = []
    for path in (full_demo.media_root / "images").iterdir():
        with Image.open(path) as image:
            modes[image.mode] += 1
            modes["turned"] += image.getexif().get(0x0112, 1) == 6
            ratios.append(image.width / image.height)
    assert min(modes[mode] for mode in ("RGB", "L", "P", "RGBA", "turned")) >= 5
    assert max(ratios) > 20
    assert min(ratios) < 1 / 15


def test_model_directory_belongs_together(full_demo) -> None:
    config = AutoConfig.from_pretrained(full_demo.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(full_demo.model_dir)
    assert tokenizer.convert_tokens_to_ids(["<image>", "<video>"]) == [
        config.image_token_id,
        config.video_token_id,
    ]
    assert len(tokenizer) <= config.text_config.vocab_size == 1024
    assert tokenizer.pad_token_id == config.text_config.pad_token_id
    assert (config.vision_config.image_size, config.vision_config.patch_size) == (70, 14)
    assert not config.tie_word_embeddings
    data = from_pretrained_dir(full_demo.model_dir, full_demo.train_path, media_root=full_demo.media_root)
    assert len(data) == 256


def test_empty_demo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1 sample"):
        build_demo(tmp_path, num_samples=0)
