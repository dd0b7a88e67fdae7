"""Records with recordings against the processor of Qwen2-Audio, and what the scan refuses."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2AudioProcessor, WhisperFeatureExtractor

from dflop_ds.data.audio import load_audio
from dflop_ds.data.dataset import LlavaDataset, from_pretrained_dir
from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.demo_audio import build_audio_demo
from dflop_ds.data.demo_model import TinyModelDims
from dflop_ds.data.probe import probe
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import MediaKind

RATE_HZ = 16_000
WINDOW_SAMPLES = 480_000


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    dims = TinyModelDims(vision_layers=1, text_layers=1)
    return build_audio_demo(tmp_path_factory.mktemp("audio"), num_samples=16, dims=dims)


@pytest.fixture(scope="module")
def processor(demo: DemoPaths) -> Qwen2AudioProcessor:
    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir)
    return Qwen2AudioProcessor(WhisperFeatureExtractor.from_pretrained(demo.model_dir), tokenizer)


@pytest.fixture(scope="module")
def data(demo: DemoPaths, processor: Qwen2AudioProcessor) -> LlavaDataset:
    """The demo's records, with the chat template that the family's processor brings along."""
    found = from_pretrained_dir(demo.model_dir, demo.train_path, media_root=demo.media_root)
    found.tokenizer.chat_template = processor.default_chat_template
    return found


def write_wav(path: Path, num_samples: int, rate_hz: int = RATE_HZ, num_channels: int = 1) -> None:
    rng = np.random.default_rng(num_samples)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(num_channels)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        noise = rng.integers(-9000, 9000, (num_samples, num_channels))
        file.writeframes(noise.astype("<i2").tobytes())


def record(name: str, audio: Any, question: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "A tone."}]
    return {"id": name, "audio": audio, "conversations": turns}


def open_records(demo: DemoPaths, folder: Path, *records: dict[str, Any]) -> LlavaDataset:
    path = folder / "records.json"
    path.write_text(json.dumps(list(records)))
    return from_pretrained_dir(demo.model_dir, path, media_root=folder)


def processed(data: LlavaDataset, processor: Qwen2AudioProcessor, index: int) -> dict[str, torch.Tensor]:
    """A sample as the processor makes it of typed messages and waveforms."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = []
    for turn in data.record(index)["conversations"]:
        text = turn["value"]
        parts = [{"type": "audio", "audio": "x"}] * text.count("<audio>")
        parts += [{"type": "text", "text": text.replace("<audio>\n", "")}]
        messages.append({"role": roles[turn["from"]], "content": parts})
    text = processor.apply_chat_template(messages, chat_template=processor.default_chat_template)
    recordings = [load_audio(path, RATE_HZ) for path in data.media_paths(index)]
    audio = {"audio": recordings, "sampling_rate": RATE_HZ} if recordings else {}
    return processor(text=text, return_tensors="pt", **audio)


def test_samples_equal_those_of_the_processor(data: LlavaDataset, processor: Qwen2AudioProcessor) -> None:
    kinds = set()
    for index in range(len(data)):
        sample, expected = data[index], processed(data, processor, index)
        kinds.add(len(sample.media))
        assert torch.equal(sample.input_ids, expected["input_ids"][0])
        assert sample.media_values is not None
        blocks = sample.media_values.split([item.num_rows for item in sample.media]) if sample.media else []
        for number, block in enumerate(blocks):
            covered = int(expected["feature_attention_mask"][number].sum())
            assert covered <= len(block) <= covered + 2
            assert torch.equal(block, expected["input_features"][number].T[: len(block)])
    assert {0, 1} < kinds, "text, one and several recordings"


def test_shapes_are_those_of_the_loaded_samples(data: LlavaDataset) -> None:
    for index in range(len(data)):
        shape, sample = data.shape(index), data[index]
        assert shape.llm_tokens == len(sample.input_ids)
        assert shape.text_tokens == shape.llm_tokens - sum(item.num_tokens for item in sample.media)
        positions = [item.num_inputs for item in sample.media]
        assert shape.encoder_inputs == shape.audio_positions == sum(positions)
        assert shape.sum_squared_frames == sum(n * n for n in positions)
        # A position is 20 ms; the last one of a recording may be partly empty.
        missing_s = 0.02 * shape.audio_positions - shape.audio_s
        assert -1e-9 <= missing_s <= 0.02 * len(positions)
        assert (shape.num_tiles, shape.num_frames) == (0, 0)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_rates_and_channels(demo: DemoPaths, tmp_path: Path, rate_hz: int, num_channels: int) -> None:
    write_wav(tmp_path / "a.wav", rate_hz + rate_hz // 2, rate_hz, num_channels)
    data = open_records(demo, tmp_path, record("a", "a.wav", "<audio>\nWhat?"))
    (item,) = data.media_items(0)
    assert (item.kind, item.num_inputs, item.num_tokens) == (MediaKind.AUDIO, 75, 37)
    assert data.shape(0).audio_s == 1.5
    assert int((data[0].input_ids == data.rule.audio_token_id).sum()) == 37


@pytest.mark.parametrize("num_samples", [1, 160, 161, 320, 321, WINDOW_SAMPLES, WINDOW_SAMPLES + 1, 600_000])
def test_edges_equal_the_processor(
    demo: DemoPaths, processor: Qwen2AudioProcessor, tmp_path: Path, num_samples: int
) -> None:
    write_wav(tmp_path / "a.wav", num_samples)
    data = open_records(demo, tmp_path, record("a", "a.wav", "<audio>\nWhat?"))
    data.tokenizer.chat_template = processor.default_chat_template
    expected = processed(data, processor, 0)
    sample = data[0]
    assert torch.equal(sample.input_ids, expected["input_ids"][0])
    assert sample.media_values is not None
    window = expected["input_features"][0].T
    assert torch.equal(sample.media_values, window[: len(sample.media_values)])
    assert data.shape(0).audio_s == num_samples / RATE_HZ, "whole length, the part that is not used included"


def test_the_scan_refuses_what_cannot_be_used(demo: DemoPaths, tmp_path: Path) -> None:
    write_wav(tmp_path / "good.wav", 9_000)
    write_wav(tmp_path / "empty.wav", 0)
    (tmp_path / "noise.wav").write_bytes(b"RIFF and nothing else")
    data = open_records(
        demo,
        tmp_path,
        record("good", "good.wav", "<audio>\nWhat?"),
        record("empty", "empty.wav", "<audio>\nWhat?"),
        record("noise", "noise.wav", "<audio>\nWhat?"),
        record("gone", "gone.wav", "<audio>\nWhat?"),
        record("too many", ["good.wav", "good.wav"], "<audio>\nWhat?"),
        {**record("picture", "good.wav", "<audio>\nWhat?"), "image": "cat.png"},
        record("token", "good.wav", "<audio> and <|AUDIO|>"),
    )
    found = probe(data, max_tokens=1_000, broken="drop")
    assert found.table.sample_ids == ["good"]
    reasons = {dropped.sample_id: dropped.reason for dropped in found.dropped}
    for name, reason in {
        "empty": "at least one sample",
        "noise": "must be readable",
        "gone": "must exist",
        "too many": "found 1 for 2 files",
        "picture": "found image files",
        "token": "must hold 1 placeholders",
    }.items():
        assert reason in reasons[name]
        assert f"sample {name!r}" in reasons[name]
    with pytest.raises(DataError, match="sample 'empty'"):
        probe(data, max_tokens=1_000)


def test_long_recordings_are_cut_with_a_warning_or_refused(
    demo: DemoPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_wav(tmp_path / "fits.wav", WINDOW_SAMPLES)
    write_wav(tmp_path / "long.wav", WINDOW_SAMPLES + 1)
    records = [record(name, f"{name}.wav", "<audio>\nWhat?") for name in ("fits", "long")]
    data = open_records(demo, tmp_path, *records)
    shapes = probe(data, max_tokens=1_000).table
    assert shapes.audio_positions.tolist() == [1500, 1500]
    probe(data, max_tokens=1_000)
    assert [entry.message for entry in caplog.records if "must last at most 30 s" in entry.message] == [
        f"the recording {tmp_path / 'long.wav'} must last at most 30 s, found 30.0001 s; "
        "its beginning is used, and that of others like it."
    ]
    strict = from_pretrained_dir(
        demo.model_dir, tmp_path / "records.json", media_root=tmp_path, long_audio="refuse"
    )
    found = probe(strict, max_tokens=1_000, broken="drop")
    assert found.table.sample_ids == ["fits"]
    assert "sample 'long': the recording" in found.dropped[0].reason
    assert strict.fingerprint() != data.fingerprint()


def test_limits_drop_whole_samples(data: LlavaDataset) -> None:
    lengths = [len(data[index].input_ids) for index in range(len(data))]
    for limit in (lengths[0] - 1, lengths[0], max(lengths)):
        fitting = [index for index, length in enumerate(lengths) if length <= limit]
        found = probe(data.without_media(), max_tokens=limit, oversized="drop")
        assert found.rows.tolist() == fitting


def test_damage_behind_a_sound_header_is_found_by_decoding(demo: DemoPaths, tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", 32_000)
    content = bytearray((tmp_path / "a.wav").read_bytes())
    content[20:22] = (0x11).to_bytes(2, "little")  # says ADPCM, which it is not
    (tmp_path / "a.wav").write_bytes(content)
    data = open_records(demo, tmp_path, record("a", "a.wav", "<audio>\nWhat?"))
    with pytest.raises(DataError, match="sample 'a'"):
        probe(data, max_tokens=1_000, scan="decode")


def test_settings_of_another_model_are_refused(demo: DemoPaths, tmp_path: Path) -> None:
    for path in demo.model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    WhisperFeatureExtractor(feature_size=80).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"\(16000, 160, 3000, 32\).*found \(16000, 160, 3000, 80\)"):
        from_pretrained_dir(tmp_path, demo.train_path, media_root=demo.media_root)
    WhisperFeatureExtractor(feature_size=32, padding_side="left").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'padding_side .*"right", found "left"'):
        from_pretrained_dir(tmp_path, demo.train_path, media_root=demo.media_root)


def test_settings_as_the_processor_saves_them_are_read(
    demo: DemoPaths, processor: Qwen2AudioProcessor, tmp_path: Path
) -> None:
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((demo.model_dir / "config.json").read_bytes())
    assert not (tmp_path / "preprocessor_config.json").exists()
    found = from_pretrained_dir(tmp_path, demo.train_path, media_root=demo.media_root)
    assert found[0].media_values is not None
