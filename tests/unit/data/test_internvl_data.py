"""InternVL data: token ids and rows equal what the processor of transformers makes of the same record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    GotOcr2ImageProcessorPil,
    InternVLForConditionalGeneration,
    InternVLProcessor,
)

from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.media import load_image
from dflop_ds.errors import ConfigError
from tests.support.model_dirs import write_internvl_model

ODD_SIZES = [(1, 1), (1, 499), (1093, 5), (16, 16), (3, 50), (50, 3)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_internvl_model(tmp_path_factory.mktemp("internvl"))


def _open(model_dir: Path, folder: Path, records: list[dict[str, Any]]) -> LlavaDataset:
    (folder / "records.json").write_text(json.dumps(records))
    return from_pretrained_dir(model_dir, folder / "records.json", media_root=folder)


def _record(question: str, **media: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "Yes."}]
    return {"id": "r1", "conversations": turns, **media}


def _write_images(folder: Path, sizes: list[tuple[int, int]]) -> list[str]:
    rng = np.random.default_rng(0)
    names = []
    for height, width in sizes:
        names.append(f"{height}x{width}.png")
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / names[-1])
    return names


def test_images_equal_the_processor(model_dir: Path, tmp_path: Path) -> None:
    """Odd sizes, all in one sample, so that each of them is cut in company too."""
    names = _write_images(tmp_path, ODD_SIZES)
    data = _open(model_dir, tmp_path, [_record("<image>\n" * len(names) + "Hi?", image=names)])
    image_processor = GotOcr2ImageProcessorPil.from_pretrained(model_dir)
    images = [load_image(tmp_path / name) for name in names]
    expected = image_processor(images, crop_to_patches=True, return_tensors="pt")
    sample = data[0]
    assert sample.media_values is not None
    assert torch.equal(sample.media_values, expected["pixel_values"])
    assert [item.num_rows for item in sample.media] == expected["num_patches"].tolist()

    processor = object.__new__(InternVLProcessor)
    processor.image_seq_length, processor.image_token = 9, "<IMG_CONTEXT>"
    processor.start_image_token, processor.end_image_token = "<img>", "</img>"
    text = "".join(processor.replace_image_token(expected, index) + "\n" for index in range(len(names)))
    chat = f"<|im_start|>user\n{text}Hi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    assert sample.input_ids.tolist() == data.tokenizer.encode(chat, add_special_tokens=False)
    shape = data.shape(0)
    assert (shape.num_tiles, shape.llm_tokens) == (len(sample.media_values), len(sample.input_ids))
    assert shape.llm_tokens - shape.text_tokens == 9 * shape.num_tiles


def test_the_model_takes_what_is_loaded(model_dir: Path, tiny_demo: DemoPaths, tmp_path: Path) -> None:
    clip = next((tiny_demo.media_root / "clips").glob("*.mp4"))
    name = _write_images(tmp_path, [(40, 90)])[0]
    mixed = _record("<video> and <image>", image=name, video=str(clip))
    data = _open(model_dir, tmp_path, [mixed, _record("Hi")])
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration(AutoConfig.from_pretrained(model_dir)).eval()
    for index, num_rows in enumerate([data.shape(0).encoder_inputs, 0]):
        sample = data[index]
        assert sample.media_values is not None
        assert len(sample.media_values) == num_rows
        inputs = {"pixel_values": sample.media_values} if num_rows else {}
        with torch.no_grad():
            logits = model(input_ids=sample.input_ids[None], **inputs).logits
        assert torch.isfinite(logits).all()
    text = data.tokenizer.decode(data[0].input_ids)
    assert "Frame1: <img><IMG_CONTEXT>" in text
    assert text.count("Frame") == data.shape(0).num_frames


def test_a_processor_of_other_tiles_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    GotOcr2ImageProcessorPil(size={"height": 30, "width": 30}).save_pretrained(folder)
    with pytest.raises(ConfigError, match="must resize to the encoder's 24 x 24 px"):
        _open(folder, tmp_path, [_record("Hi")])
