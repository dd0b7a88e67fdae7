"""Header probing against what decoding gives."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from dflop_ds.data.demo import DemoPaths
from dflop_ds.data.media import (
    clip_info,
    frame_indices,
    image_size,
    load_frames,
    load_image,
    upright_size,
)
from dflop_ds.errors import DataError

HEIGHT, WIDTH = 30, 50


def _gradient() -> Image.Image:
    rows = np.linspace(0, 255, HEIGHT * WIDTH * 3).astype(np.uint8)
    return Image.fromarray(rows.reshape(HEIGHT, WIDTH, 3))


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def write_clip(path: Path, num_frames: int, *, rotation: int = 0, brighter: int = 6) -> None:
    """Frames of increasing brightness; the left half of each is darker."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(5))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = np.full((48, 64, 3), 40 + brighter * number, dtype=np.uint8)
            pixels[:, :32] = 0
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_size_and_pixels_follow_exif(tmp_path: Path, suffix: str, orientation: int) -> None:
    path = tmp_path / f"turned.{suffix}"
    _gradient().save(path, exif=_exif(orientation))
    expected = (WIDTH, HEIGHT) if orientation >= 5 else (HEIGHT, WIDTH)
    assert image_size(path) == expected
    assert load_image(path).size == expected[::-1]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1"])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    image = _gradient().quantize(16) if mode == "P" else _gradient().convert(mode)
    image.save(path)
    loaded = load_image(path)
    assert image_size(path) == (HEIGHT, WIDTH)
    assert loaded.mode == "RGB"
    assert np.array_equal(np.asarray(loaded), np.asarray(image.convert("RGB")))


def test_sixteen_bit_values_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH)
    Image.fromarray(values).save(tmp_path / "deep.png")
    loaded = np.asarray(load_image(tmp_path / "deep.png"))
    assert np.array_equal(loaded[..., 0], values >> 8)


def test_png_metadata_behind_the_pixels_counts(tmp_path: Path) -> None:
    """EXIF may follow the pixels of a PNG; only such a file is decoded for its size."""
    path = tmp_path / "late.png"
    _gradient().save(path)
    sound = path.read_bytes()
    exif = tmp_path / "exif.png"
    _gradient().save(exif, exif=_exif(6))
    content = exif.read_bytes()
    start = content.index(b"eXIf") - 4
    chunk = content[start : start + 12 + int.from_bytes(content[start : start + 4], "big")]
    path.write_bytes(sound[:-12] + chunk + sound[-12:])
    assert image_size(path) == (WIDTH, HEIGHT)
    assert load_image(path).size == (HEIGHT, WIDTH)


@pytest.mark.parametrize("name", ["plain.jpg", "plain.png", "comment.png"])
def test_size_decodes_no_pixel(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "nothing about orientation")
    _gradient().save(tmp_path / name, **({"pnginfo": info} if name.endswith("png") else {}))

    def refuse(self: Image.Image) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert image_size(tmp_path / name) == (HEIGHT, WIDTH)


def test_truncated_image_has_a_size_but_no_pixels(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    _gradient().resize((500, 300)).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    assert image_size(path) == (300, 500)
    with pytest.raises(DataError, match=r"cut\.jpg must be readable.*\"scan\": \"decode\""):
        load_image(path)


@pytest.mark.parametrize("function", [image_size, load_image, clip_info, lambda path: load_frames(path, [0])])
def test_missing_and_foreign_files_are_named(tmp_path: Path, function) -> None:
    with pytest.raises(DataError, match=r"gone\.bin must exist"):
        function(tmp_path / "gone.bin")
    (tmp_path / "text.bin").write_text("no media at all")
    with pytest.raises(DataError, match=r"text\.bin must be readable"):
        function(tmp_path / "text.bin")


@pytest.mark.parametrize("function", [image_size, load_image, clip_info, lambda path: load_frames(path, [0])])
def test_a_named_pipe_is_refused(tmp_path: Path, function) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match="found a named pipe"):
        function(tmp_path / "pipe.png")


@pytest.mark.parametrize("name", ["12:30.mp4", "http:/127.0.0.1:1/x.mp4"])
def test_a_colon_in_a_relative_path_is_no_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    write_clip(tmp_path / name, 3)
    assert clip_info(Path(name)).num_frames == len(load_frames(Path(name), [0, 1, 2])) == 3


def test_frame_counts_equal_decoding(tiny_demo: DemoPaths) -> None:
    paths = sorted((tiny_demo.media_root / "clips").glob("*.mp4"))
    assert paths
    for path in paths:
        info = clip_info(path)
        with av.open(str(path)) as container:
            frames = list(container.decode(container.streams.video[0]))
        assert info.num_frames == len(frames)
        assert (info.height, info.width) == (frames[0].height, frames[0].width)
        assert 4 <= info.fps <= 8


def test_packets_are_counted_when_the_container_names_no_frame_count(tmp_path: Path) -> None:
    path = tmp_path / "clip.mkv"
    write_clip(path, 7)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert clip_info(path).num_frames == 7


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_the_rate_of_a_clip_is_the_mean_over_its_frames(tmp_path: Path, suffix: str) -> None:
    """Matroska states the rate of the encoder, whatever the time stamps are."""
    path = tmp_path / f"clip.{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(30))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for stamp in (0, 1, 2, 150, 151, 300):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = stamp, Fraction(1, 30)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    info = clip_info(path)
    assert info.num_frames == 6
    # The stamps cover 10 s; whether the last frame has a duration as well, the container decides.
    assert 5 / 10 <= info.fps <= 6 / 10


@pytest.mark.parametrize("brighter", [0, 20], ids=["few key frames", "many key frames"])
def test_frames_before_the_beginning_of_a_cut_clip_are_not_counted(tmp_path: Path, brighter: int) -> None:
    """Cutting without encoding keeps frames from the last key frame on, and an edit list hides them."""
    whole, cut = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    write_clip(whole, 10, brighter=brighter)
    with av.open(str(whole)) as source, av.open(str(cut), "w", options={"avoid_negative_ts": "0"}) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                shift = round(Fraction(4, 5) / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = stream
                out.mux(packet)
    with av.open(str(cut)) as container:
        assert container.streams.video[0].frames == 10
        num_decoded = sum(1 for _ in container.decode(video=0))
    assert clip_info(cut).num_frames == num_decoded == 6
    assert len(load_frames(cut, range(6))) == 6


def test_frames_are_those_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_clip(path, 20)
    with av.open(str(path)) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]
    frames = load_frames(path, [0, 7, 13])
    assert [np.array_equal(frame, every[k]) for frame, k in zip(frames, [0, 7, 13], strict=True)] == [
        True
    ] * 3


def test_decoding_stops_at_the_last_frame_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    write_clip(path, 20)
    decoded = []

    class Counting:
        def __init__(self, container) -> None:
            self.container, self.streams = container, container.streams

        def __enter__(self):
            return self

        def __exit__(self, *error) -> None:
            self.container.close()

        def decode(self, stream):
            for frame in self.container.decode(stream):
                decoded.append(frame)
                yield frame

    opener = av.open
    monkeypatch.setattr("dflop_ds.data.media.av.open", lambda name: Counting(opener(name)))
    assert len(load_frames(path, [0, 2])) == 2
    assert len(decoded) == 3


def test_rotation_of_the_container_is_applied(tmp_path: Path) -> None:
    """Turned by 90 degrees counterclockwise, the dark left half comes to lie at the bottom."""
    path = tmp_path / "turned.mp4"
    write_clip(path, 3, rotation=90)
    with av.open(str(path)) as container:
        assert next(container.decode(container.streams.video[0])).rotation == 90
    frame = load_frames(path, [1])[0]
    assert frame.shape == (64, 48, 3)
    assert frame[:28].mean() > frame[36:].mean() + 20
    assert upright_size(path) == (64, 48)


def test_too_few_frames_are_named(tmp_path: Path) -> None:
    write_clip(tmp_path / "short.mp4", 4)
    with pytest.raises(DataError, match=r"short\.mp4 must hold frame 9, found 4 frames"):
        load_frames(tmp_path / "short.mp4", [0, 9])


def test_sound_without_pictures_is_no_clip(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(DataError, match="must have a video stream"):
        clip_info(path)


@given(
    total=st.integers(1, 5000),
    fps=st.floats(0, 240),
    rate=st.floats(0.01, 60),
    limit=st.integers(1, 128),
)
def test_frame_indices_are_even_and_inside(total: int, fps: float, rate: float, limit: int) -> None:
    indices = frame_indices(total, fps, rate, limit)
    assert indices[0] == 0
    assert 1 <= len(indices) <= min(limit, total)
    assert indices[-1] < total
    steps = np.diff(indices)
    assert steps.size == 0 or (steps.min() >= 1 and steps.max() - steps.min() <= 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10, 5.0, 1.0, 32), [0, 5]),
        ((10, 5.0, 5.0, 32), list(range(10))),
        ((10, 5.0, 5.0, 4), [0, 2, 5, 7]),
        ((3, 30.0, 1.0, 32), [0]),
        ((6, 0.0, 1.0, 3), [0, 2, 4]),
    ],
)
def test_frame_indices_by_hand(arguments: tuple[int, float, float, int], expected: list[int]) -> None:
    assert frame_indices(*arguments) == expected


@pytest.mark.parametrize("arguments", [(0, 5.0, 1.0, 4), (5, 5.0, 1.0, 0), (5, 5.0, 0.0, 4)])
def test_impossible_sampling_is_refused(arguments: tuple[int, float, float, int]) -> None:
    with pytest.raises(DataError, match="sampling a clip needs"):
        frame_indices(*arguments)
