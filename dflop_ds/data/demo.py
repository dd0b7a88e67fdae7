"""A small multimodal data set and model directory, made on the spot without any download.

Pictures and clips are crops of the two photographs that scikit-learn ships; the text comes from a
small grammar. Sizes, lengths and formats vary as they do in instruction data: most samples are
short, a few are very long.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from dflop_ds.data.demo_model import TinyModelDims, write_tiny_model
from dflop_ds.data.demo_text import answer_text, chat_text, question_text
from dflop_ds.errors import ConfigError

Pixels = npt.NDArray[np.uint8]

_MIN_SIDE_PX = 60
_LONGEST_TEXT_WORDS = 700
_SHORTEST_TEXT_WORDS = 20
_MAX_CLIP_FRAMES = 32
_TURNED_RIGHT = 6


@dataclasses.dataclass(frozen=True)
class DemoPaths:
    """Where the parts of a demo lie.

    Attributes
    ----------
    model_dir : Path
        ``config.json``, tokenizer and image processor; no weights unless asked for.
    train_path : Path
        Records, JSON lines.
    media_root : Path
        Folder that the records' media paths start from.
    """

    model_dir: Path
    train_path: Path
    media_root: Path


def build_demo(
    out: str | Path,
    *,
    num_samples: int = 256,
    seed: int = 0,
    dims: TinyModelDims | None = None,
    with_weights: bool = False,
) -> DemoPaths:
    """Write ``out/data`` and ``out/model``; the same arguments give the same files.

    Of clips the frames are the same; their encoder does not promise the same bytes.

    About 45 % of the samples hold one image, 15 % several, 15 % a clip and 25 % text only.

    Parameters
    ----------
    out : str or Path
    num_samples : int
    seed : int
    dims : TinyModelDims, optional
        Size of the model.
    with_weights : bool
        Also write random weights.

    Raises
    ------
    ConfigError
        If ``num_samples`` is below 1.
    """
    check_num_samples(num_samples)
    out = Path(out)
    media_root = out / "data"
    for folder in ("images", "clips"):
        (media_root / folder).mkdir(parents=True, exist_ok=True)
    photos = _photographs()
    records = []
    for number, kind in enumerate(_kinds(num_samples, np.random.default_rng([seed, num_samples]))):
        rng = np.random.default_rng([seed, num_samples, number])
        records.append({"id": f"demo-{number:05d}", **_WRITERS[kind](rng, number, media_root, photos)})
    train_path, texts = write_records(media_root, records)
    model_dir = write_tiny_model(out / "model", texts, dims=dims, seed=seed, with_weights=with_weights)
    return DemoPaths(model_dir, train_path, media_root)


def check_num_samples(num_samples: int) -> None:
    """Raise :class:`ConfigError` unless a demo has samples."""
    if num_samples < 1:
        raise ConfigError(
            f"a demo must have at least 1 sample, found num_samples {num_samples}; ask for more."
        )


def write_records(media_root: Path, records: list[dict[str, Any]]) -> tuple[Path, list[str]]:
    """Write the records of a demo; returns their file and all texts in them."""
    train_path = media_root / "train.jsonl"
    train_path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return train_path, [turn["value"] for record in records for turn in record["conversations"]]


def _photographs() -> list[Pixels]:
    from sklearn.datasets import load_sample_images

    return [np.asarray(photo, dtype=np.uint8) for photo in load_sample_images().images]


def _kinds(num_samples: int, rng: np.random.Generator) -> list[str]:
    """What each sample holds, in the stated shares, shuffled."""
    shares = {"one_image": 0.45, "several_images": 0.15, "clip": 0.15}
    kinds = [kind for kind, share in shares.items() for _ in range(round(share * num_samples))][:num_samples]
    kinds += ["text"] * (num_samples - len(kinds))
    return [kinds[i] for i in rng.permutation(num_samples)]


def _one_image(rng: np.random.Generator, number: int, root: Path, photos: list[Pixels]) -> dict[str, Any]:
    path = _write_image(rng, f"{number:05d}", root, photos)
    turns = [(f"<image>\n{question_text(rng, 'picture')}", answer_text(rng))]
    while len(turns) < 4 and rng.random() < 0.35:
        turns.append((question_text(rng, "picture"), answer_text(rng)))
    return {"image": path, "conversations": chat_turns(turns)}


def _several_images(
    rng: np.random.Generator, number: int, root: Path, photos: list[Pixels]
) -> dict[str, Any]:
    count = int(rng.integers(2, 6))
    paths = [_write_image(rng, f"{number:05d}-{k}", root, photos) for k in range(count)]
    front = "<image>\n" * count
    return {
        "image": paths,
        "conversations": chat_turns([(front + question_text(rng, "pictures"), answer_text(rng))]),
    }


def _clip(rng: np.random.Generator, number: int, root: Path, photos: list[Pixels]) -> dict[str, Any]:
    path = f"clips/{number:05d}.mp4"
    _write_clip(rng, root / path, photos[int(rng.integers(len(photos)))])
    # Both spellings occur in the wild: the clip's own placeholder and that of an image.
    placeholder = "<video>" if rng.random() < 0.5 else "<image>"
    return {
        "video": path,
        "conversations": chat_turns([(f"{placeholder}\n{question_text(rng, 'clip')}", answer_text(rng))]),
    }


def _text(rng: np.random.Generator, number: int, root: Path, photos: list[Pixels]) -> dict[str, Any]:
    spread = math.log(_LONGEST_TEXT_WORDS / _SHORTEST_TEXT_WORDS)
    # Squaring a uniform number leaves many short chats and a long tail.
    num_words = round(_SHORTEST_TEXT_WORDS * math.exp(spread * rng.random() ** 2))
    return {"conversations": chat_turns([chat_text(rng, num_words)])}


_WRITERS: dict[str, Callable[[np.random.Generator, int, Path, list[Pixels]], dict[str, Any]]] = {
    "one_image": _one_image,
    "several_images": _several_images,
    "clip": _clip,
    "text": _text,
}


def chat_turns(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"from": sender, "value": value}
        for question, answer in pairs
        for sender, value in (("human", question), ("gpt", answer))
    ]


def _crop(rng: np.random.Generator, photo: Pixels) -> Pixels:
    """A random part of a photograph; one in ten is a narrow strip."""
    height, width = photo.shape[:2]
    crop_height = int(_MIN_SIDE_PX * (height / _MIN_SIDE_PX) ** rng.random())
    crop_width = int(_MIN_SIDE_PX * (width / _MIN_SIDE_PX) ** rng.random())
    draw = rng.random()
    if draw < 0.05:
        crop_height, crop_width = int(rng.integers(8, 24)), width
    elif draw < 0.1:
        crop_height, crop_width = height, int(rng.integers(8, 24))
    elif draw < 0.2:
        crop_height, crop_width = height, width
    top = int(rng.integers(height - crop_height + 1))
    left = int(rng.integers(width - crop_width + 1))
    return photo[top : top + crop_height, left : left + crop_width]


def _write_image(rng: np.random.Generator, stem: str, root: Path, photos: list[Pixels]) -> str:
    image = Image.fromarray(np.ascontiguousarray(_crop(rng, photos[int(rng.integers(len(photos)))])))
    style = rng.choice(["jpeg", "turned", "gray", "palette", "alpha"], p=[0.6, 0.1, 0.1, 0.1, 0.1])
    path = f"images/{stem}.{'jpg' if style in ('jpeg', 'turned') else 'png'}"
    if style == "turned":
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = _TURNED_RIGHT
        image.save(root / path, quality=85, exif=exif)
    elif style == "gray":
        image.convert("L").save(root / path)
    elif style == "palette":
        image.quantize(64).save(root / path)
    elif style == "alpha":
        image.putalpha(int(rng.integers(64, 256)))
        image.save(root / path)
    else:
        image.save(root / path, quality=85)
    return path


def _write_clip(rng: np.random.Generator, path: Path, photo: Pixels) -> None:
    """A window that moves over a photograph."""
    height, width = (2 * int(rng.integers(24, 81)) for _ in range(2))
    num_frames = int(rng.integers(2, _MAX_CLIP_FRAMES + 1))
    ends = rng.random((2, 2)) * [photo.shape[0] - height, photo.shape[1] - width]
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(int(rng.integers(4, 9))))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for step in np.linspace(0.0, 1.0, num_frames):
            top, left = (ends[0] + (ends[1] - ends[0]) * step).astype(int)
            window = np.ascontiguousarray(photo[top : top + height, left : left + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode())
    path.write_bytes(buffer.getvalue())
