"""The integer tensor that travels with the activations of one microbatch.

Between pipeline stages DeepSpeed sends tensors only, and every float tensor is taken to carry a
gradient. So a microbatch is one float tensor (pixels, then hidden states) and one ``int64``
vector, written here, that says what the float tensor means: how many samples are packed, which
media they hold, the token ids and the positions at which logits are wanted.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dflop_ds.errors import PlanError

_VERSION = 1
_HEADER = 6
_MEDIA_FIELDS = 5


class MediaKind(enum.IntEnum):
    """How the encoder output of one media item becomes LLM tokens."""

    TILED_IMAGE = 0
    """One image cut into tiles: base view, un-padded high resolution grid, newline per row."""
    WHOLE_IMAGE = 1
    """One of several images, not tiled: patches and one newline."""
    CLIP = 2
    """Frames of a clip, pooled 2x2, and one newline."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaItem:
    """One image or clip of a sample.

    Attributes
    ----------
    kind : MediaKind
    num_inputs : int
        Encoder batch entries: tiles of an image, frames of a clip.
    height, width : int
        Size in pixels after EXIF orientation, before resizing.
    num_tokens : int
        LLM tokens that it becomes, newlines included.
    """

    kind: MediaKind
    num_inputs: int
    height: int
    width: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """What a microbatch holds.

    Attributes
    ----------
    tag : int
        Checksum of the data set indices inside, see :func:`bin_tag`.
    segment_lengths : tuple of int
        LLM tokens of each packed sample; attention stays inside a segment.
    media : tuple of MediaItem
        In the order of their placeholders.
    input_ids : Tensor of int64, shape (sum(segment_lengths),)
    logit_positions : Tensor of int64, shape (num_logits,)
        Positions whose next token is supervised; logits are computed there only.
    """

    tag: int
    segment_lengths: tuple[int, ...]
    media: tuple[MediaItem, ...]
    input_ids: torch.Tensor
    logit_positions: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """LLM tokens of the microbatch."""
        return sum(self.segment_lengths)

    @property
    def num_encoder_inputs(self) -> int:
        """Tiles plus frames of the microbatch."""
        return sum(item.num_inputs for item in self.media)

    def position_ids(self) -> torch.Tensor:
        """Positions that restart with every segment, shape (num_tokens,)."""
        device = self.input_ids.device
        return torch.cat([torch.arange(length, device=device) for length in self.segment_lengths])

    def encode(self) -> torch.Tensor:
        """Write the layout as one ``int64`` vector."""
        header = [
            _VERSION,
            self.tag,
            len(self.segment_lengths),
            len(self.media),
            self.input_ids.numel(),
            self.logit_positions.numel(),
        ]
        media = [
            value
            for item in self.media
            for value in (int(item.kind), item.num_inputs, item.height, item.width, item.num_tokens)
        ]
        head = torch.tensor([*header, *self.segment_lengths, *media], dtype=torch.int64)
        return torch.cat([head.to(self.input_ids.device), self.input_ids.long(), self.logit_positions.long()])

    @classmethod
    def decode(cls, vector: torch.Tensor) -> PackedLayout:
        """Read a layout; the result is remembered for the lifetime of ``vector``.

        Parameters
        ----------
        vector : Tensor of int64, shape (n,)

        Raises
        ------
        PlanError
            If the vector was not written by :meth:`encode`.
        """
        known = _DECODED.get(vector)
        if known is not None:
            return known
        layout = cls._decode(vector)
        _DECODED[vector] = layout
        return layout

    @classmethod
    def _decode(cls, vector: torch.Tensor) -> PackedLayout:
        head = vector[:_HEADER].tolist()
        if len(head) < _HEADER or head[0] != _VERSION:
            raise PlanError(
                f"a microbatch must start with layout version {_VERSION}, found {head[:1]}; "
                "all ranks must run the same dflop_ds and collate with PackedCollator."
            )
        _, tag, num_segments, num_media, num_ids, num_logits = head
        stop = _HEADER + num_segments + _MEDIA_FIELDS * num_media
        if vector.numel() != stop + num_ids + num_logits:
            raise PlanError(
                f"a microbatch layout must hold {stop + num_ids + num_logits} numbers by its header, "
                f"found {vector.numel()}; collate with PackedCollator."
            )
        body = vector[_HEADER:stop].tolist()
        rows = [body[i : i + _MEDIA_FIELDS] for i in range(num_segments, len(body), _MEDIA_FIELDS)]
        kinds = {int(kind) for kind in MediaKind}
        if sum(body[:num_segments]) != num_ids or any(row[0] not in kinds for row in rows):
            raise PlanError(
                f"segments must add up to {num_ids} tokens and media kinds be in {sorted(kinds)}, "
                f"found lengths {body[:num_segments]} and kinds {[row[0] for row in rows]}; "
                "collate with PackedCollator."
            )
        return cls(
            tag=tag,
            segment_lengths=tuple(body[:num_segments]),
            media=tuple(MediaItem(MediaKind(row[0]), *row[1:]) for row in rows),
            input_ids=vector[stop : stop + num_ids],
            logit_positions=vector[stop + num_ids :],
        )


_DECODED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def bin_tag(indices: Iterable[int]) -> int:
    """Checksum of the data set indices of one microbatch, in their packed order."""
    return zlib.crc32(np.asarray(list(indices), dtype=np.int64).tobytes())
