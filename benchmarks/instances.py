"""Global batches with real and synthetic shapes, and what they cost on a 7B-like model.

Shapes follow LLaVA-OneVision's tile and token rules. Times are FLOPs of `dflop_ds.flops` at a fixed rate,
so they are predictions, not measurements.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflop_ds import flops
from dflop_ds.cost.split import balanced_split
from dflop_ds.families.llava_onevision import LlavaOnevisionRule

TRACES = Path(__file__).parent / "traces"
TOKENS_PER_WORD = 1.3
TARGET_SHARE = 0.5
MAX_FRAMES = 32
FLOPS_PER_S = 400e12

# SigLIP-so400m/14-384 and Qwen2.5-7B, from their published config.json files.
DIMS = flops.ModelDims(
    vision=flops.VisionDims(1152, 4304, 16, 26, 384, 14),
    llm=flops.LlmDims(3584, 18944, 28, 4, 128, 28, 152064),
)
RULE = LlavaOnevisionRule.from_config({})
MIXTURE = {"image": 0.45, "multi_image": 0.15, "video": 0.15, "text": 0.25}
SYNTHETIC = ("uniform", "lognormal", "giant", "equal")


@dataclasses.dataclass(frozen=True)
class Samples:
    """Shapes of samples, arrays of shape (n,).

    Attributes
    ----------
    encoder_inputs, llm_tokens, target_tokens : ndarray of float64
    """

    encoder_inputs: npt.NDArray[np.float64]
    llm_tokens: npt.NDArray[np.float64]
    target_tokens: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.llm_tokens)

    def take(self, rows: npt.NDArray[np.int64]) -> Samples:
        """The given rows."""
        return Samples(self.encoder_inputs[rows], self.llm_tokens[rows], self.target_tokens[rows])


def draw(name: str, num_samples: int, seed: int, trace: Path | None = None) -> Samples:
    """A global batch of an instance family: "mixed", a kind of `MIXTURE`, or one of `SYNTHETIC`."""
    rng = np.random.default_rng([seed, num_samples])
    if trace is not None:
        pool = _from_rows([_user_row(row) for row in _read(trace)])
        return pool.take(rng.integers(0, len(pool), num_samples))
    if name in SYNTHETIC:
        return _synthetic(name, num_samples, rng)
    kinds = MIXTURE if name == "mixed" else {name: 1.0}
    counts = rng.multinomial(num_samples, list(kinds.values()))
    rows = [row for kind, count in zip(kinds, counts, strict=True) for row in _KINDS[kind](int(count), rng)]
    return _from_rows([rows[index] for index in rng.permutation(num_samples)])


def layer_times_s(samples: Samples) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Layer kinds in order and forward seconds of each sample in each layer, shape (n, num_layers)."""
    vision, llm = DIMS.vision, DIMS.llm
    tokens = samples.llm_tokens
    encoder = flops.vision_block_flops(vision, samples.encoder_inputs)
    decoder = flops.decoder_linear_flops(llm, tokens) + flops.decoder_attention_flops(llm, tokens**2)
    kinds = ["vision_block"] * vision.num_layers + ["projector"]
    columns = [encoder] * vision.num_layers + [flops.projector_flops(DIMS, samples.encoder_inputs)]
    kinds += ["decoder_layer"] * llm.num_layers + ["head"]
    columns += [decoder] * llm.num_layers + [flops.head_flops(llm, samples.target_tokens)]
    return kinds, np.stack(columns, axis=1) / FLOPS_PER_S


def module_costs_s(samples: Samples) -> npt.NDArray[np.float64]:
    """Forward plus backward seconds in the encoder with projector, and in the LLM, shape (n, 2)."""
    kinds, times_s = layer_times_s(samples)
    first = kinds.index("decoder_layer")
    forward_s = np.stack([times_s[:, :first].sum(axis=1), times_s[:, first:].sum(axis=1)], axis=1)
    return (1.0 + flops.BACKWARD_RATIO) * forward_s


def stage_times_s(samples: Samples, num_stages: int) -> npt.NDArray[np.float64]:
    """Forward seconds of each sample in each stage of the pipeline balanced for these samples."""
    kinds, times_s = layer_times_s(samples)
    edges = balanced_split(kinds, times_s.mean(axis=0), num_stages)
    parts = [times_s[:, a:b].sum(axis=1) for a, b in itertools.pairwise(edges)]
    return np.stack(parts, axis=1)


def _read(path: Path) -> list[dict[str, str]]:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    return list(csv.DictReader(io.StringIO(text.decode())))


def _from_rows(rows: list[tuple[int, int, float]]) -> Samples:
    """From (encoder inputs, media tokens, text tokens)."""
    inputs, media, text = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    text = np.maximum(np.rint(text), 8.0)
    return Samples(inputs, media + text, np.rint(TARGET_SHARE * text))


def _user_row(row: dict[str, str]) -> tuple[int, int, float]:
    text, kind = float(row["text_tokens"]), row["kind"]
    if kind == "video":
        return _clip(float(row["duration_s"]), text)
    if kind == "text":
        return 0, 0, text
    num_images = int(row.get("num_images") or 1)
    shape = RULE.image(int(row["height"]), int(row["width"]), num_images)
    return num_images * shape.num_inputs, num_images * shape.num_tokens, text


def _clip(duration_s: float, text_tokens: float) -> tuple[int, int, float]:
    shape = RULE.clip(max(1, min(MAX_FRAMES, round(duration_s))))
    return shape.num_inputs, shape.num_tokens, text_tokens


def _tiled(row: dict[str, str]) -> tuple[int, int, float]:
    """A lone image that fills the squarest grid with the tiles of the row (base view apart)."""
    num_tiles = max(1, int(row["vit_tiles"]) - 1)
    high = max(side for side in range(1, math.isqrt(num_tiles) + 1) if num_tiles % side == 0)
    shape = RULE.image(RULE.tile_px * high, RULE.tile_px * num_tiles // high, 1)
    return shape.num_inputs, shape.num_tokens, float(row["text_tokens"])


def _images(count: int, rng: np.random.Generator) -> list[tuple[int, int, float]]:
    tiles, receipts = _read(TRACES / "tiles.csv.gz"), _read(TRACES / "images.csv.gz")
    rows = []
    for _ in range(count):
        if rng.random() < 0.85:
            rows.append(_tiled(tiles[rng.integers(len(tiles))]))
        else:
            row = receipts[rng.integers(len(receipts))]
            shape = RULE.image(int(row["height"]), int(row["width"]), 1)
            rows.append((shape.num_inputs, shape.num_tokens, TOKENS_PER_WORD * float(row["text_words"])))
    return rows


def _multi_images(count: int, rng: np.random.Generator) -> list[tuple[int, int, float]]:
    tiles, rows = _read(TRACES / "tiles.csv.gz"), []
    for _ in range(count):
        num_images = int(rng.integers(2, 9))
        shape = RULE.image(RULE.tile_px, RULE.tile_px, num_images)
        text = sum(float(tiles[index]["text_tokens"]) for index in rng.integers(len(tiles), size=num_images))
        rows.append((num_images * shape.num_inputs, num_images * shape.num_tokens, text))
    return rows


def _videos(count: int, rng: np.random.Generator) -> list[tuple[int, int, float]]:
    rows = _read(TRACES / "videos.csv.gz")
    chosen = [rows[index] for index in rng.integers(len(rows), size=count)]
    return [_clip(float(row["duration_s"]), TOKENS_PER_WORD * float(row["text_words"])) for row in chosen]


def _texts(count: int, rng: np.random.Generator) -> list[tuple[int, int, float]]:
    rows = _read(TRACES / "turns.csv.gz")
    chosen = [rows[index] for index in rng.integers(len(rows), size=count)]
    return [(0, 0, TOKENS_PER_WORD * float(row["text_words"])) for row in chosen]


def _synthetic(name: str, num_samples: int, rng: np.random.Generator) -> Samples:
    """Shapes from formulas; "giant" has one sample as heavy as twice the mean bin of 8 samples."""
    if name == "equal":
        text = np.full(num_samples, 512.0)
    elif name == "uniform":
        text = rng.uniform(64, 4096, num_samples)
    else:
        text = rng.lognormal(6.0, 0.8, num_samples)
    inputs = np.full(num_samples, 2.0)
    if name != "equal":
        inputs = rng.integers(0, 8, num_samples).astype(np.float64)
    if name == "giant":
        inputs[0], text[0] = 0.0, 0.0
        mean_tokens = float((text + inputs * 730).mean())
        text[0] = 16.0 * mean_tokens
    return _from_rows(list(zip(inputs.astype(int), (inputs * 730).astype(int), text, strict=True)))


_KINDS: dict[str, Callable[[int, np.random.Generator], list[tuple[int, int, float]]]] = {
    "image": _images,
    "multi_image": _multi_images,
    "video": _videos,
    "text": _texts,
}
