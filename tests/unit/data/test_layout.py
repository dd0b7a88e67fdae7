"""The layout vector: round trip, damage, positions, tags."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from dflop_ds.data.layout import MediaItem, MediaKind, PackedLayout, bin_tag
from dflop_ds.errors import PlanError

MEDIA = {
    "none": (),
    "one": (MediaItem(MediaKind.TILED_IMAGE, 7, 7, 1500, (480, 640)),),
    "several": (
        MediaItem(MediaKind.WHOLE_IMAGE, 1, 1, 26, (20, 30)),
        MediaItem(MediaKind.CLIP, 32, 128, 6273, (9, 8, 7, 6)),
        MediaItem(MediaKind.AUDIO, 2, 2, 3),
    ),
}


def _layout(media: tuple[MediaItem, ...] = (), lengths: tuple[int, ...] = (3, 1, 2)) -> PackedLayout:
    return PackedLayout(
        tag=0xFFFFFFFF,
        segment_lengths=lengths,
        media=media,
        input_ids=torch.arange(100, 100 + sum(lengths)),
        logit_positions=torch.tensor([0, 1, 4]),
    )


@pytest.mark.parametrize("media", MEDIA)
def test_round_trip(media: str) -> None:
    layout = _layout(MEDIA[media])
    vector = layout.encode()
    assert vector.dtype == torch.int64
    assert vector.dim() == 1
    found = PackedLayout.decode(vector)
    assert (found.tag, found.segment_lengths) == (0xFFFFFFFF, (3, 1, 2))
    assert found.media == MEDIA[media]
    assert all(isinstance(item.kind, MediaKind) for item in found.media)
    assert found.input_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert found.logit_positions.tolist() == [0, 1, 4]
    assert found.num_tokens == 6
    assert found.num_encoder_inputs == {"none": 0, "one": 7, "several": 35}[media]


def test_nothing_is_supervised() -> None:
    layout = PackedLayout(5, (2,), (), torch.tensor([8, 9]), torch.empty(0, dtype=torch.int64))
    found = PackedLayout.decode(layout.encode())
    assert found.input_ids.tolist() == [8, 9]
    assert found.logit_positions.shape == (0,)


def test_ids_of_other_integer_types_are_widened() -> None:
    layout = PackedLayout(5, (2,), (), torch.tensor([8, 9], dtype=torch.int32), torch.tensor([1]))
    assert PackedLayout.decode(layout.encode()).input_ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda v: v[:0], "layout version 2"),
        (lambda v: v[:5], "layout version 2"),
        (lambda v: torch.cat([torch.tensor([1]), v[1:]]), r"layout version 2, found \[1\]"),
        (lambda v: v[:-1], r"must hold 34 numbers by its header, found 33"),
        (lambda v: torch.cat([v, v[:1]]), r"must hold 34 numbers by its header, found 35"),
        (lambda v: torch.cat([v[:3], v[3:4] + 1, v[4:]]), r"must hold 35 numbers by its header, found 34"),
    ],
)
def test_damaged_vectors_are_refused(damage, message) -> None:
    vector = _layout(MEDIA["one"] * 2, lengths=(3, 1, 4)).encode()
    assert vector.numel() == 6 + 3 + 2 * 7 + 8 + 3  # header, segments, media, ids, positions
    with pytest.raises(PlanError, match=message):
        PackedLayout.decode(damage(vector))


@pytest.mark.parametrize(
    ("position", "value"),
    [(9, 7), (6, 4), (13, 3), (13, 1), (13, -1)],
    ids=["media_kind", "segment_length", "extent_too_long", "extent_too_short", "extent_negative"],
)
def test_damaged_content_is_refused(position: int, value: int) -> None:
    """A kind that is none, segments longer than the tokens, and extents that end elsewhere."""
    vector = _layout(MEDIA["one"]).encode()
    vector[position] = value
    with pytest.raises(PlanError):
        PackedLayout.decode(vector)


def test_positions_restart_with_every_segment() -> None:
    assert _layout(lengths=(3, 1, 2)).position_ids().tolist() == [0, 1, 2, 0, 0, 1]
    assert _layout(lengths=(4,)).position_ids().tolist() == [0, 1, 2, 3]


def test_tag_is_the_checksum_of_the_indices_as_int64() -> None:
    for indices in ([], [0], [3, 1, 2], [2**40, 7]):
        expected = zlib.crc32(b"".join(index.to_bytes(8, "little") for index in indices))
        assert bin_tag(indices) == expected
        assert bin_tag(np.array(indices, dtype=np.int64)) == expected


def test_tag_depends_on_order_and_content() -> None:
    tags = [bin_tag(indices) for indices in ([1, 2], [2, 1], [1, 3], [1], [1, 2, 2], [])]
    assert len(set(tags)) == len(tags)


def test_tag_takes_an_iterator_once() -> None:
    assert bin_tag(index for index in (4, 5)) == bin_tag([4, 5])


def test_decoding_is_remembered_per_tensor_only() -> None:
    vector = _layout(MEDIA["several"]).encode()
    first = PackedLayout.decode(vector)
    assert PackedLayout.decode(vector) is first
    other = _layout(MEDIA["one"], lengths=(1, 5)).encode()
    assert PackedLayout.decode(other).segment_lengths == (1, 5)
    assert PackedLayout.decode(vector.clone()).media == first.media
    assert PackedLayout.decode(vector).segment_lengths == (3, 1, 2)


def test_remembered_layouts_do_not_leak_into_reused_memory() -> None:
    """Tensors that are freed and made again at the same address are decoded anew."""
    for length in range(1, 60):
        vector = _layout(lengths=(length, 60 - length)).encode()
        assert PackedLayout.decode(vector).segment_lengths == (length, 60 - length)
        del vector
