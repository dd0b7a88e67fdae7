"""Packing: shift, weights, padding and the empty microbatch, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflop_ds.data.collate import PackedCollator
from dflop_ds.data.dataset import LoadedSample
from dflop_ds.data.layout import MediaItem, MediaKind, PackedLayout, bin_tag
from dflop_ds.errors import ConfigError, DataError

TILE_PX = 2
PAD = 99


def _sample(index: int, labels: list[int], *, num_inputs: int = 0, pixels: bool = True) -> LoadedSample:
    ids = torch.arange(len(labels)) + 10 * index
    media = (MediaItem(MediaKind.CLIP, num_inputs, num_inputs, 1),) if num_inputs else ()
    values = torch.full((num_inputs, 3, TILE_PX, TILE_PX), float(index)) if pixels else None
    return LoadedSample(index, f"s{index}", ids, torch.tensor(labels), media, values)


def _collate(samples: list[LoadedSample], **options: Any) -> Any:
    (pixels, meta), labels = PackedCollator(PAD, row_shape=(3, TILE_PX, TILE_PX), **options)(samples)
    return pixels, PackedLayout.decode(meta), *labels


def test_labels_are_shifted_inside_each_sample() -> None:
    """The supervised first token of the second sample is no target of the first one."""
    pixels, layout, targets, weights, tag = _collate(
        [_sample(1, [-100, 11, -100, 13]), _sample(2, [20, 21, -100], num_inputs=2)]
    )
    assert layout.segment_lengths == (4, 3)
    assert layout.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert layout.logit_positions.tolist() == [0, 2, 4]
    assert targets.tolist() == [11, 13, 21]
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert layout.tag == bin_tag([1, 2]) == int(tag[0])
    assert [item.num_inputs for item in layout.media] == [2]
    assert torch.equal(pixels, torch.full((2, 3, TILE_PX, TILE_PX), 2.0))
    kinds = [pixels.dtype, targets.dtype, weights.dtype, tag.dtype]
    assert kinds == [torch.float32, torch.int64, torch.float32, torch.int64]


def test_order_of_samples_is_kept() -> None:
    first, second = _sample(1, [-100, 11], num_inputs=1), _sample(2, [-100, 21], num_inputs=1)
    pixels, layout, targets, _, tag = _collate([second, first])
    assert targets.tolist() == [21, 11]
    assert pixels[:, 0, 0, 0].tolist() == [2.0, 1.0]
    assert int(tag[0]) == bin_tag([2, 1]) != bin_tag([1, 2])
    assert layout.position_ids().tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("reduction", "normalise", "expected"),
    [
        ("token", "none", [1.0, 1.0, 1.0]),
        ("sample", "none", [0.5, 0.5, 1.0]),
        ("token", "microbatch", [1 / 3, 1 / 3, 1 / 3]),
        ("sample", "microbatch", [0.25, 0.25, 0.5]),
    ],
)
def test_weights(reduction: str, normalise: str, expected: list[float]) -> None:
    samples = [_sample(1, [-100, 11, 12]), _sample(2, [-100, 21]), _sample(3, [-100, -100])]
    weights = _collate(samples, reduction=reduction, normalise=normalise)[3]
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("normalise", ["none", "microbatch"])
def test_nothing_supervised(normalise: str) -> None:
    _, layout, targets, weights, _ = _collate(
        [_sample(1, [-100, -100]), _sample(2, [5])], normalise=normalise
    )
    assert (layout.num_tokens, targets.numel(), weights.numel()) == (3, 0, 0)


@pytest.mark.parametrize("normalise", ["none", "microbatch"])
def test_empty_microbatch_is_one_pad_token(normalise: str) -> None:
    pixels, layout, targets, weights, tag = _collate([], normalise=normalise)
    assert layout.input_ids.tolist() == [PAD]
    assert layout.segment_lengths == (1,)
    assert pixels.shape == (0, 3, TILE_PX, TILE_PX)
    assert (targets.numel(), weights.numel(), layout.logit_positions.numel()) == (0, 0, 0)
    assert int(tag[0]) == bin_tag([])


def test_padding_to_the_longest() -> None:
    samples = [_sample(1, [-100, 11]), _sample(2, [-100, 21, 22, 23]), _sample(3, [-100, 31, 32])]
    _, padded, targets, _, _ = _collate(samples, pad_to_longest=True)
    _, packed, same_targets, _, _ = _collate(samples)
    assert padded.segment_lengths == (4, 4, 4)
    assert padded.input_ids.tolist() == [10, 11, PAD, PAD, 20, 21, 22, 23, 30, 31, 32, PAD]
    assert torch.equal(targets, same_targets)
    assert (
        padded.input_ids[padded.logit_positions].tolist() == packed.input_ids[packed.logit_positions].tolist()
    )


def test_samples_without_media_keep_their_media() -> None:
    pixels, layout, targets, _, _ = _collate([_sample(1, [-100, 11], num_inputs=3, pixels=False)])
    assert pixels.shape == (0, 3, TILE_PX, TILE_PX)
    assert layout.num_encoder_inputs == 3
    assert targets.tolist() == [11]


def test_pixels_that_contradict_the_media_are_named() -> None:
    sample = LoadedSample(
        4, "s4", torch.zeros(2, dtype=torch.int64), torch.zeros(2), (), torch.zeros(1, 3, 2, 2)
    )
    with pytest.raises(DataError, match=r"sample 's4'.*by the sample's media"):
        _collate([sample])


@pytest.mark.parametrize("options", [{"reduction": "mean"}, {"normalise": "batch"}])
def test_unknown_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="choose one of them"):
        PackedCollator(PAD, row_shape=(3, TILE_PX, TILE_PX), **options)
