"""Recordings: header probing against decoding, resampling against the analytic signal."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import av
import numpy as np
import pytest

from dflop_ds.data.audio import AudioInfo, audio_info, load_audio, resampled_length
from dflop_ds.errors import DataError

TARGET_HZ = 16_000
EDGE_SAMPLES = 400


def tone(num_samples: int, rate_hz: int, frequency_hz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency_hz * np.arange(num_samples) / rate_hz)


def write_wav(path: Path, channels: list[np.ndarray], rate_hz: int) -> Path:
    """16-bit PCM, one array per channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(np.round(np.stack(channels, axis=1) * 32767).astype("<i2").tobytes())
    return path


def write_with_av(path: Path, container_format: str, codec: str, samples: np.ndarray, rate_hz: int) -> Path:
    with av.open(str(path), "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate_hz)
        stream.layout = "stereo"
        both = np.stack([samples, samples]).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = rate_hz, 0
        sampler = av.AudioResampler(format=stream.codec_context.format, layout="stereo", rate=rate_hz)
        for piece in [*sampler.resample(frame), *sampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("num_samples", [1, 159, 160, 161, 480_000, 480_001])
def test_wav_at_the_target_rate_is_exact(tmp_path: Path, num_samples: int) -> None:
    wanted = tone(num_samples, TARGET_HZ)
    path = write_wav(tmp_path / "a.wav", [wanted], TARGET_HZ)
    assert audio_info(path) == AudioInfo(num_samples, TARGET_HZ, 1)
    found = load_audio(path, TARGET_HZ)
    assert found.shape == (num_samples,)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000, 44_056])
def test_other_rates_are_resampled(tmp_path: Path, rate_hz: int) -> None:
    num_samples = 2 * rate_hz + 37
    path = write_wav(tmp_path / "a.wav", [tone(num_samples, rate_hz)], rate_hz)
    found = load_audio(path, TARGET_HZ)
    assert len(found) == math.ceil(num_samples * TARGET_HZ / rate_hz)
    inner = slice(EDGE_SAMPLES, -EDGE_SAMPLES)
    assert np.abs(found - tone(len(found), TARGET_HZ))[inner].max() < 1e-3


@pytest.mark.parametrize("rate_hz", [TARGET_HZ, 44_100])
def test_channels_are_averaged(tmp_path: Path, rate_hz: int) -> None:
    num_samples = rate_hz
    left, right = tone(num_samples, rate_hz, 300.0), 0.4 * tone(num_samples, rate_hz, 900.0)
    stereo = write_wav(tmp_path / "stereo.wav", [left, right], rate_hz)
    mono = write_wav(tmp_path / "mono.wav", [(left + right) / 2], rate_hz)
    assert audio_info(stereo).num_channels == 2
    assert np.abs(load_audio(stereo, TARGET_HZ) - load_audio(mono, TARGET_HZ)).max() < 1e-4
    three = write_wav(tmp_path / "three.wav", [left, left, left], rate_hz)
    alone = write_wav(tmp_path / "alone.wav", [left], rate_hz)
    assert np.abs(load_audio(three, TARGET_HZ) - load_audio(alone, TARGET_HZ)).max() < 1e-4


@pytest.mark.parametrize("num_channels", [6, 8, 9, 16])
def test_many_channels_are_averaged(tmp_path: Path, num_channels: int) -> None:
    channels = [tone(1600, TARGET_HZ, 100.0 * (number + 1)) for number in range(num_channels)]
    path = write_wav(tmp_path / "many.wav", channels, TARGET_HZ)
    assert np.abs(load_audio(path, TARGET_HZ) - np.mean(channels, axis=0)).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "container_format", "codec", "rate_hz"),
    [
        ("a.flac", "flac", "flac", 44_100),
        ("a.mp3", "mp3", "libmp3lame", 44_100),
        ("a.m4a", "ipod", "aac", 44_100),
        ("a.aac", "adts", "aac", 44_100),
        ("a.opus", "ogg", "libopus", 48_000),
        ("a.webm", "webm", "libopus", 48_000),
        ("a.ts", "mpegts", "aac", 44_100),
    ],
)
def test_compressed_formats_are_as_long_as_their_header_says(
    tmp_path: Path, name: str, container_format: str, codec: str, rate_hz: int
) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    num_samples = 60_000
    path = write_with_av(tmp_path / name, container_format, codec, tone(num_samples, rate_hz), rate_hz)
    info = audio_info(path)
    assert info.sampling_rate_hz == rate_hz
    assert info.num_channels == 2
    assert info.duration_s == pytest.approx(num_samples / rate_hz, abs=0.05)
    found = load_audio(path, TARGET_HZ)
    assert len(found) == resampled_length(info.num_samples, rate_hz, TARGET_HZ)
    assert np.abs(found).max() == pytest.approx(0.5, abs=0.1)


def test_decoding_stops_at_the_limit(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", [tone(40_000, 22_050)], 22_050)
    whole, part = load_audio(path, TARGET_HZ), load_audio(path, TARGET_HZ, max_samples=5_000)
    assert np.array_equal(part, whole[:5_000])
    assert len(load_audio(path, TARGET_HZ, max_samples=10**9)) == len(whole)


def test_sound_of_a_film_is_used(tmp_path: Path) -> None:
    path = tmp_path / "film.mkv"
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=5)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("pcm_s16le", rate=TARGET_HZ)
        sound.layout = "mono"
        pixels = np.zeros((48, 64, 3), dtype=np.uint8)
        for _ in range(10):
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        values = (tone(TARGET_HZ, TARGET_HZ) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(values, format="s16", layout="mono")
        frame.sample_rate, frame.pts = TARGET_HZ, 0
        container.mux([*sound.encode(frame), *sound.encode(), *video.encode()])
    assert audio_info(path).duration_s == pytest.approx(1.0, abs=0.05)
    assert len(load_audio(path, TARGET_HZ)) == pytest.approx(TARGET_HZ, abs=800)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"not a recording at all")
    empty = write_wav(tmp_path / "empty.wav", [np.zeros(0)], TARGET_HZ)
    silent_film = tmp_path / "silent.mkv"
    with av.open(str(silent_film), "w") as container:
        video = container.add_stream("mpeg4", rate=5)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        pixels = np.zeros((48, 64, 3), dtype=np.uint8)
        container.mux([*video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")), *video.encode()])
    for path, reason in (
        (tmp_path / "missing.wav", "must exist"),
        (noise, "must be readable"),
        (empty, "at least one sample"),
        (silent_film, "audio stream"),
    ):
        with pytest.raises(DataError, match=reason) as caught:
            audio_info(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(("stated_samples", "found"), [(50_000, "more"), (70_000, "3\\.750 s")])
def test_a_recording_that_contradicts_its_header_is_refused(
    tmp_path: Path, stated_samples: int, found: str
) -> None:
    path = write_with_av(tmp_path / "a.flac", "flac", "flac", tone(60_000, TARGET_HZ), TARGET_HZ)
    content = bytearray(path.read_bytes())
    content[22:26] = stated_samples.to_bytes(4, "big")
    path.write_bytes(content)
    assert audio_info(path).num_samples == stated_samples
    with pytest.raises(DataError, match=f"by its header, found {found}") as caught:
        load_audio(path, TARGET_HZ)
    assert str(path) in str(caught.value)


def test_damage_behind_a_sound_header_is_named(tmp_path: Path) -> None:
    path = write_with_av(tmp_path / "a.flac", "flac", "flac", tone(60_000, TARGET_HZ), TARGET_HZ)
    path.write_bytes(path.read_bytes()[:9_000])
    assert audio_info(path).num_samples == 60_000
    with pytest.raises(DataError, match=r"recording .*a\.flac must"):
        load_audio(path, TARGET_HZ)


def test_a_cut_wav_is_as_long_as_what_is_left(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", [tone(60_000, TARGET_HZ)], TARGET_HZ)
    path.write_bytes(path.read_bytes()[:40_044])
    assert audio_info(path).num_samples == 20_000
    assert len(load_audio(path, TARGET_HZ)) == 20_000
