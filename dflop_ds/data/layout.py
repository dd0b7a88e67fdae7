"""The integer tensor that travels with the activations of one microbatch.

Between pipeline stages DeepSpeed sends tensors only, and every float tensor is taken to carry a
gradient. So a microbatch is one float tensor (media values, then hidden states) and one ``int64``
vector, written here, that says what the float tensor means: how many samples are packed, which
media they hold, the token ids and the positions at which logits are wanted. It begins with a
version and the lengths of its parts, so that it is read without knowing the model family.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dflop_ds.errors import PlanError
from dflop_ds.families import MediaItem, MediaKind

__all__ = ["MediaItem", "MediaKind", "PackedLayout", "bin_tag"]

_VERSION = 2
_HEADER = 6
_MEDIA_FIELDS = 5
"""Kind, inputs, rows, tokens and the length of the extent, which follows."""


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
        """Encoder inputs of the microbatch, as the cost model counts them."""
        return sum(item.num_inputs for item in self.media)

    @property
    def rows_per_item(self) -> list[int]:
        """Rows of the media tensor that belong to each media item; they are in the same order."""
        return [item.num_rows for item in self.media]

    def position_ids(self) -> torch.Tensor:
        """Positions that restart with every segment, shape (num_tokens,)."""
        device = self.input_ids.device
        return torch.cat([torch.arange(length, device=device) for length in self.segment_lengths])

    def encode(self) -> torch.Tensor:
        """Write the layout as one ``int64`` vector."""
        media = [value for item in self.media for value in _numbers(item)]
        header = [
            _VERSION,
            self.tag,
            len(self.segment_lengths),
            len(media),
            self.input_ids.numel(),
            self.logit_positions.numel(),
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
        _, tag, num_segments, num_media_numbers, num_ids, num_logits = head
        stop = _HEADER + num_segments + num_media_numbers
        if vector.numel() != stop + num_ids + num_logits:
            raise PlanError(
                f"a microbatch layout must hold {stop + num_ids + num_logits} numbers by its header, "
                f"found {vector.numel()}; collate with PackedCollator."
            )
        body = vector[_HEADER:stop].tolist()
        if sum(body[:num_segments]) != num_ids:
            raise PlanError(
                f"segments must add up to {num_ids} tokens, found lengths {body[:num_segments]}; "
                "collate with PackedCollator."
            )
        return cls(
            tag=tag,
            segment_lengths=tuple(body[:num_segments]),
            media=_read_media(body[num_segments:]),
            input_ids=vector[stop : stop + num_ids],
            logit_positions=vector[stop + num_ids :],
        )


def _numbers(item: MediaItem) -> list[int]:
    fields = [int(item.kind), item.num_inputs, item.num_rows, item.num_tokens]
    return [*fields, len(item.extent), *item.extent]


def _read_media(numbers: list[int]) -> tuple[MediaItem, ...]:
    items = []
    start = 0
    kinds = {int(kind) for kind in MediaKind}
    while start < len(numbers):
        fields = numbers[start : start + _MEDIA_FIELDS]
        start += _MEDIA_FIELDS
        stop = start + fields[-1]
        if len(fields) < _MEDIA_FIELDS or fields[0] not in kinds or not start <= stop <= len(numbers):
            raise PlanError(
                f"a media item must be {_MEDIA_FIELDS} numbers, the first in {sorted(kinds)} and the last "
                f"the length of what follows, found {fields}; collate with PackedCollator."
            )
        kind, num_inputs, num_rows, num_tokens, _ = fields
        extent = tuple(numbers[start:stop])
        items.append(MediaItem(MediaKind(kind), num_inputs, num_rows, num_tokens, extent))
        start = stop
    return tuple(items)


_DECODED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def bin_tag(indices: Iterable[int]) -> int:
    """Checksum of the data set indices of one microbatch, in their packed order."""
    return zlib.crc32(np.asarray(list(indices), dtype=np.int64).tobytes())
