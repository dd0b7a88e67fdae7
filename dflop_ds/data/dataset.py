"""LLaVA-style records as packed-training samples."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflop_ds.data.conversation import (
    Conversation,
    TokenizedSample,
    check_tokenizer,
    parse_record,
    tokenize_conversation,
)
from dflop_ds.data.processor import SETTINGS_FILES, MediaProcessor, read_settings
from dflop_ds.data.reader import LongAudio, MediaReader
from dflop_ds.data.records import Records, open_records
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import MediaItem, MediaRule, Modality, family_of
from dflop_ds.shapes import SampleShape

DEFAULT_MAX_FRAMES = 32
DEFAULT_FRAMES_PER_SECOND = 1.0


@dataclasses.dataclass(frozen=True)
class LoadedSample:
    """One sample, ready to be packed.

    Attributes
    ----------
    index : int
        Position in the data set.
    sample_id : str
    input_ids, labels : Tensor of int64, shape (num_tokens,)
        Labels are -100 where nothing is supervised, and not shifted.
    media : tuple of MediaItem
        In the order of their placeholders.
    media_values : Tensor of float32, shape (num_rows, *row_shape), or None
        Rows of all media items; what a row is, the model family decides. None when the data set
        was asked for no media.
    """

    index: int
    sample_id: str
    input_ids: torch.Tensor
    labels: torch.Tensor
    media: tuple[MediaItem, ...]
    media_values: torch.Tensor | None


class LlavaDataset(Dataset[LoadedSample]):
    """Map-style data set over LLaVA conversation records.

    Parameters
    ----------
    records : str, Path or Records
        What :func:`~dflop_ds.data.records.open_records` opens: a file, a mixture, a saved data set of
        ``datasets``; or records that are open already.
    media_root : str or Path
        Folder that relative media paths start from.
    tokenizer : PreTrainedTokenizerBase
        Fast, with a chat template.
    rule : MediaRule
        Of the model's family, see :func:`dflop_ds.families.media_rule`.
    processor : MediaProcessor
        Of the same family.
    max_frames : int
        Frames taken of one clip at most.
    frames_per_second : float
        Sampling rate of clips.
    long_audio : {"cut", "refuse"}
        What happens to recordings of which the model takes the beginning only.
    load_media : bool
        False: media are looked at no further than their headers.
    seed : int
        Decides what a mixture draws.

    Raises
    ------
    ConfigError
        If tokenizer and rule do not belong together, or a setting is out of range.
    DataError
        If the records cannot be read.
    """

    def __init__(
        self,
        records: str | Path | Records,
        *,
        media_root: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        rule: MediaRule,
        processor: MediaProcessor,
        max_frames: int = DEFAULT_MAX_FRAMES,
        frames_per_second: float = DEFAULT_FRAMES_PER_SECOND,
        long_audio: LongAudio = "cut",
        load_media: bool = True,
        seed: int = 0,
    ) -> None:
        self.reader = MediaReader(media_root, rule, max_frames, frames_per_second, long_audio)
        check_tokenizer(tokenizer, rule.placeholders.values())
        self.records_path = Path(records) if isinstance(records, (str, Path)) else None
        self.tokenizer = tokenizer
        self.rule = rule
        self.processor = processor
        self.load_media = load_media
        self._records = open_records(records, seed) if isinstance(records, (str, Path)) else records

    def __len__(self) -> int:
        return len(self._records)

    def record(self, index: int) -> Any:
        """The record as it stands in the file."""
        return self._records[index]

    def sample_id(self, index: int) -> str:
        """The record's ``id``, or where it stands in the file when it has none."""
        try:
            record = self._records[index]
        except DataError:
            return self._records.fallback_id(index)
        given = record.get("id") if isinstance(record, dict) else None
        if given is None:
            return self._records.fallback_id(index)
        # Ids are written to logs and checkpoints, which hold no lone surrogates.
        return str(given).encode("utf-8", "backslashreplace").decode("utf-8")

    def shape(self, index: int) -> SampleShape:
        """Shape of a sample from media headers and its text, without decoding media.

        Raises
        ------
        DataError
            If the record or one of its media is unusable.
        """
        conversation = self._conversation(index)
        items = self._items(conversation)
        tokenized = self._tokenize(conversation, items)
        num_tokens = len(tokenized.input_ids)
        sizes: dict[str, Any] = {"num_tiles": 0, "num_frames": 0}
        for item in items:
            for name, size in self.rule.sizes(item).items():
                sizes[name] = sizes.get(name, 0) + size
        return SampleShape(
            sample_id=conversation.sample_id,
            text_tokens=num_tokens - sum(item.num_tokens for item in items),
            llm_tokens=num_tokens,
            target_tokens=tokenized.target_tokens,
            **sizes,
        )

    def media_paths(self, index: int) -> list[Path]:
        """Files that a sample needs, in the order of their placeholders; not what the record holds itself."""
        sources = [self.reader.source(ref) for ref in self._conversation(index).media if not ref.is_decoded]
        return [source for source in sources if isinstance(source, Path)]

    def media_items(self, index: int) -> tuple[MediaItem, ...]:
        """Media of a sample from their headers, in the order of their placeholders."""
        return self._items(self._conversation(index))

    def check_media(self, index: int) -> None:
        """Decode every media file of a sample and forget the result.

        Raises
        ------
        DataError
            If one cannot be decoded.
        """
        conversation = self._conversation(index)
        for ref in conversation.media:
            _with_id(conversation.sample_id, self.reader.load, ref)

    def __getitem__(self, index: int) -> LoadedSample:
        conversation = self._conversation(index)
        items = self._items(conversation)
        tokenized = self._tokenize(conversation, items)
        return LoadedSample(
            index=int(index),
            sample_id=conversation.sample_id,
            input_ids=torch.from_numpy(tokenized.input_ids),
            labels=torch.from_numpy(tokenized.labels),
            media=items,
            media_values=self._media_values(conversation, items) if self.load_media else None,
        )

    def without_media(self) -> LlavaDataset:
        """The same data set for ranks that need tokens and labels only."""
        light = copy.copy(self)
        light.load_media = False
        return light

    def with_records(self, records: Records) -> LlavaDataset:
        """The same settings over other records."""
        other = copy.copy(self)
        other._records = records
        return other

    def record_key(self, index: int) -> str:
        """What a record says, or which one it is where it holds media itself."""
        try:
            return json.dumps(self._records[index], sort_keys=True)
        except (TypeError, ValueError):
            return json.dumps([*self._records.fingerprint(), index])

    def fingerprint(self) -> str:
        """Checksum of everything but records and media files that decides shapes."""
        parts = [
            str(self.reader.root.resolve()),
            repr(self.rule),
            self.reader.max_frames,
            self.reader.frames_per_second,
            self.reader.long_audio,
            self.tokenizer.chat_template,
            cast(Any, self.tokenizer).backend_tokenizer.to_str(),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _conversation(self, index: int) -> Conversation:
        return parse_record(self._records[index], self.sample_id(index), self.rule.placeholders)

    def _items(self, conversation: Conversation) -> tuple[MediaItem, ...]:
        num_images = sum(ref.modality is Modality.IMAGE for ref in conversation.media)
        return tuple(
            _with_id(conversation.sample_id, self.reader.item, ref, num_images) for ref in conversation.media
        )

    def _tokenize(self, conversation: Conversation, items: tuple[MediaItem, ...]) -> TokenizedSample:
        return tokenize_conversation(conversation, self.tokenizer, items, self.rule)

    def _media_values(self, conversation: Conversation, items: tuple[MediaItem, ...]) -> torch.Tensor:
        media = [_with_id(conversation.sample_id, self.reader.load, ref) for ref in conversation.media]
        blocks = self.processor.rows(items, media)
        for ref, item, block in zip(conversation.media, items, blocks, strict=True):
            expected = (item.num_rows, *self.processor.row_shape)
            if tuple(block.shape) != expected:
                raise DataError(
                    f"{ref.path} must give media values of shape {expected} by its header, "
                    f"found {tuple(block.shape)}; use the preprocessor_config.json that belongs to "
                    "the model.",
                    conversation.sample_id,
                )
        return torch.cat([torch.empty(0, *self.processor.row_shape), *blocks])


def _with_id(sample_id: str, function: Any, *arguments: Any) -> Any:
    """Call a function; its DataError is raised again with the sample's id."""
    try:
        return function(*arguments)
    except DataError as error:
        raise DataError(str(error), sample_id) from error


def from_pretrained_dir(
    model_dir: str | Path,
    records: str | Path | Records,
    *,
    media_root: str | Path,
    max_frames: int = DEFAULT_MAX_FRAMES,
    frames_per_second: float = DEFAULT_FRAMES_PER_SECOND,
    long_audio: LongAudio = "cut",
    load_media: bool = True,
    seed: int = 0,
) -> LlavaDataset:
    """Data set for the model in a local Hugging Face directory.

    Parameters
    ----------
    model_dir : str or Path
        Holds ``config.json``, ``tokenizer.json`` and ``preprocessor_config.json`` (or
        ``processor_config.json``, as newer versions save it); nothing is downloaded.
    records, media_root, max_frames, frames_per_second, long_audio, load_media, seed
        As :class:`LlavaDataset`.

    Raises
    ------
    ConfigError
        If a file is missing or the files do not belong together.
    """
    model_dir = Path(model_dir)
    missing = [] if (model_dir / "config.json").is_file() else ["config.json"]
    if not any((model_dir / f"{name}.json").is_file() for name in SETTINGS_FILES):
        missing.append("preprocessor_config.json")
    if missing:
        raise ConfigError(
            f"{model_dir} must hold a Hugging Face model, found no {', '.join(missing)}; "
            "save the model's configuration, tokenizer and processor there."
        )
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        family = family_of(config)
        rule = family.rule(config, read_settings(model_dir))
        processor = family.open_processor(model_dir, rule)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model_dir} must hold a readable configuration, tokenizer and preprocessor, found {error}; "
            "save them there again."
        ) from error
    return LlavaDataset(
        records,
        media_root=media_root,
        tokenizer=tokenizer,
        rule=rule,
        processor=processor,
        max_frames=max_frames,
        frames_per_second=frames_per_second,
        long_audio=long_audio,
        load_media=load_media,
        seed=seed,
    )
