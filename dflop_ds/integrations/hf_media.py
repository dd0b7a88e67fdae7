"""Zero-weight media for microbatches that have none, so that every rank runs the encoder.

Under ZeRO a rank that skips the encoder leaves the others waiting in its collectives for ever, and under DDP
its missing gradients may be dropped. ZeRO 3 starts a step by overwriting gradient buffers: a parameter that
takes no part in the first microbatch is updated with what an earlier step has left there. So a small media
item of the data set is added behind the text: its placeholders are masked, carry no label and come last, so
that no other position sees them. Its gradients are zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflop_ds.errors import DataError
from dflop_ds.scheduling.rank_planner import RankPlanner

IGNORED = -100
_NUM_KNOWN = 8


@dataclasses.dataclass(frozen=True)
class MediaKind:
    """One way into an encoder.

    Attributes
    ----------
    key : str
        Argument of the model that carries it.
    token : str
        What the model's configuration calls its placeholder: ``<token>_token_id`` or ``<token>_token_index``.
    is_video : bool
        Whether its encoder inputs are frames.
    """

    key: str
    token: str
    is_video: bool


MEDIA = (
    MediaKind("pixel_values", "image", False),
    MediaKind("pixel_values_videos", "video", True),
    MediaKind("input_features", "audio", False),
)


@dataclasses.dataclass(frozen=True)
class Dummy:
    """The media arguments of one small sample and the placeholder tokens that they need."""

    arguments: dict[str, torch.Tensor]
    token_id: int
    num_tokens: int


def media_flags(batch: dict[str, Any]) -> int:
    """Which kinds of media a batch holds, one bit each."""
    return sum(1 << bit for bit, kind in enumerate(MEDIA) if batch.get(kind.key) is not None)


def needed_flags(flags: Sequence[Sequence[int]], first: int = 0) -> list[int]:
    """Kinds of media that every rank must have in each slot, from those that ranks have.

    Parameters
    ----------
    flags : sequence of sequences of int
        Per rank and slot. The last slot needs every kind of the whole step: gradients are reduced there.
    first : int
        Kinds that the first slot needs in any case.
    """
    needed = [first] + [0] * (len(flags[0]) - 1)
    for row in flags:
        for slot, value in enumerate(row):
            needed[slot] |= value
    for value in needed[:-1]:
        needed[-1] |= value
    return needed


class DummyMedia:
    """Finds small media in the data set and adds them to batches that lack some.

    Parameters
    ----------
    model_config : object
        Configuration of the model, which names the placeholder tokens.
    load : callable of int to batch
        Collates one sample alone.
    planner : RankPlanner
        Knows the sizes of the samples.
    """

    def __init__(self, model_config: Any, load: Callable[[int], Any], planner: RankPlanner) -> None:
        self._config, self._load, self._planner = model_config, load, planner
        self._dummies: dict[str, Dummy] = {}
        self._holders: dict[str, list[int]] = {}

    def note(self, flags: Sequence[int], bins: Sequence[Sequence[int]]) -> None:
        """Remember samples that share a bin with each kind of media; `flags` has one number per bin."""
        for bit, kind in enumerate(MEDIA):
            found = [
                row for value, members in zip(flags, bins, strict=True) if value >> bit & 1 for row in members
            ]
            self._holders[kind.key] = found or self._holders.get(kind.key, [])

    def complete(self, batch: dict[str, Any], needed: int) -> dict[str, Any]:
        """The batch with every needed kind of media; itself if it lacks none."""
        missing = needed & ~media_flags(batch)
        for bit, kind in enumerate(MEDIA):
            if missing & (1 << bit):
                batch = add_dummy(batch, self._dummy(kind))
        return batch

    def _dummy(self, kind: MediaKind) -> Dummy:
        if kind.key not in self._dummies:
            self._dummies[kind.key] = self._find(kind)
        return self._dummies[kind.key]

    def _find(self, kind: MediaKind) -> Dummy:
        token_id = placeholder_id(self._config, kind)
        known = self._planner.media_candidates(with_frames=kind.is_video, limit=_NUM_KNOWN)
        for index in [*known, *self._planner.shortest_first(self._holders.get(kind.key, []))]:
            batch = self._load(index)
            if media_flags(batch) != 1 << MEDIA.index(kind):
                continue
            arguments = {
                key: value
                for key, value in batch.items()
                if isinstance(value, torch.Tensor) and not _is_text(key, value, batch["input_ids"])
            }
            num_tokens = int((batch["input_ids"] == token_id).sum())
            if num_tokens:
                return Dummy(arguments, token_id, num_tokens)
        raise DataError(
            f"a sample whose only media are {kind.key} must exist to keep ranks without any in step, found "
            "none among the shortest and in this step. Add short ones to the training data."
        )


def placeholder_id(model_config: Any, kind: MediaKind) -> int:
    """Token that stands for a kind of media.

    Raises
    ------
    DataError
        If the model's configuration does not name it.
    """
    for name in (f"{kind.token}_token_id", f"{kind.token}_token_index"):
        value = getattr(model_config, name, None)
        if value is not None:
            return int(value)
    raise DataError(
        f"the model configuration must name its {kind.token} token ({kind.token}_token_id), found none. "
        f"Text-only microbatches cannot be combined with {kind.key} for this model."
    )


def add_dummy(batch: dict[str, Any], dummy: Dummy) -> dict[str, Any]:
    """A batch with media arguments added and their placeholders behind its text.

    Padded batches get columns (placeholders in the first row), packed ones a segment of their own.

    Raises
    ------
    DataError
        If the batch has an argument that cannot be extended.
    """
    ids = batch["input_ids"]
    for key in ("attention_mask", "position_ids"):
        shape = getattr(batch.get(key), "shape", ids.shape)
        if shape != ids.shape:
            raise DataError(
                f"{key} must have shape {tuple(ids.shape)} where a microbatch has no media, found "
                f"{tuple(shape)}. Pack by position_ids of one axis."
            )
    num_rows, count = ids.shape[0], dummy.num_tokens
    placeholders = ids.new_zeros(num_rows, count)
    placeholders[0] = dummy.token_id
    added: dict[str, Any] = {"input_ids": placeholders}
    for key, value in batch.items():
        if key != "input_ids" and isinstance(value, torch.Tensor) and value.shape == ids.shape:
            added[key] = value.new_full((num_rows, count), IGNORED if key.endswith("labels") else 0)
    if "position_ids" in added:
        added["position_ids"] += torch.arange(count, device=ids.device)
    result = dict(batch)
    for key, tail in added.items():
        result[key] = torch.cat([batch[key], tail], dim=1)
    _extend_offsets(result, batch, count)
    clash = sorted(key for key in dummy.arguments if batch.get(key) is not None)
    if clash:
        raise DataError(
            f"a batch without media must not have {clash}, found them. Leave them out in the collator."
        )
    return result | {key: value.to(ids.device) for key, value in dummy.arguments.items()}


def _extend_offsets(result: dict[str, Any], batch: dict[str, Any], count: int) -> None:
    """One more segment in the offsets of a variable-length attention kernel."""
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(key) is not None:
            result[key] = torch.cat([batch[key], batch[key][-1:] + count])
    for key in ("max_length_q", "max_length_k"):
        if batch.get(key) is not None:
            result[key] = max(batch[key], count)


def _is_text(key: str, value: torch.Tensor, ids: torch.Tensor) -> bool:
    return value.shape == ids.shape or key.startswith(("cu_seq_lens", "max_length"))


def mask_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with no supervised position: it then adds nothing to a summed loss."""
    masked = {
        key: torch.full_like(batch[key], IGNORED)
        for key in ("labels", "shift_labels")
        if isinstance(batch.get(key), torch.Tensor)
    }
    return {**batch, **masked}
