"""Three-axis positions against ``get_rope_index`` of transformers."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLModel

from dflop_ds.errors import DataError
from dflop_ds.families.mrope import TokenGrid, mrope_positions

TEXT, IMAGE, CLIP = 0, 1, 2

SAMPLES: dict[str, list[Any]] = {
    "text": [7],
    "one image": [3, (IMAGE, 4, 6), 5],
    "image first": [(IMAGE, 2, 3), 4],
    "image last": [4, (IMAGE, 5, 1)],
    "image alone": [(IMAGE, 1, 1)],
    "several images": [2, (IMAGE, 4, 6), 1, (IMAGE, 1, 9), 3, (IMAGE, 8, 2), 2],
    "clip": [3, (CLIP, 4, 2, 5, 1.0), 6],
    "slow clip": [3, (CLIP, 9, 3, 3, 0.37), 6],
    "long clip": [1, (CLIP, 16, 2, 3, 5.9), 20],
    "one frame": [1, (CLIP, 1, 4, 4, 0.083333), 2],
    "mixed": [2, (CLIP, 3, 2, 2, 0.7), 2, (IMAGE, 3, 4), 1, (CLIP, 5, 1, 2, 2.13), 4, (IMAGE, 2, 2), 3],
}


def _reference(parts: list[Any], tokens_per_second: int) -> np.ndarray:
    """Positions by the model's own method, which needs no weights."""
    kinds, images, clips, seconds = [], [], [], []
    for part in parts:
        if isinstance(part, int):
            kinds += [TEXT] * part
        elif part[0] == IMAGE:
            kinds += [IMAGE] * (part[1] * part[2])
            images.append([1, 2 * part[1], 2 * part[2]])
        else:
            kinds += [CLIP] * (part[1] * part[2] * part[3])
            clips.append([part[1], 2 * part[2], 2 * part[3]])
            seconds.append(part[4])
    model = object.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    vision = types.SimpleNamespace(spatial_merge_size=2, tokens_per_second=tokens_per_second)
    model.config = types.SimpleNamespace(vision_config=vision)
    positions, _ = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.int64),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(clips) if clips else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    return positions[:, 0].numpy()


@pytest.mark.parametrize("tokens_per_second", [2, 4, 25])
@pytest.mark.parametrize("case", SAMPLES)
def test_positions_equal_transformers(case: str, tokens_per_second: int) -> None:
    parts = SAMPLES[case]
    grids, is_media = [], []
    for part in parts:
        if isinstance(part, int):
            is_media += [False] * part
            continue
        if part[0] == IMAGE:
            grids.append(TokenGrid(1, part[1], part[2]))
        else:
            interval = float(np.float32(tokens_per_second) * np.float32(part[4]))
            grids.append(TokenGrid(part[1], part[2], part[3], interval))
        is_media += [True] * grids[-1].num_tokens
    found = mrope_positions(np.array(is_media, dtype=np.bool_), grids)
    assert np.array_equal(found, _reference(parts, tokens_per_second))


def test_adjacent_images_follow_one_another() -> None:
    """By the rule of the model: the second grid starts behind the longer side of the first."""
    found = mrope_positions(np.ones(4, dtype=np.bool_), [TokenGrid(1, 1, 2), TokenGrid(1, 2, 1)])
    assert found.tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]


def test_grids_that_do_not_fill_the_placeholders_are_refused() -> None:
    with pytest.raises(DataError, match="3 placeholder tokens, found 4"):
        mrope_positions(np.array([True, False, True, True]), [TokenGrid(1, 2, 2)])
