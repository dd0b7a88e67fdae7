"""LLaVA-style records as packed-training samples."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, LlavaOnevisionImageProcessorPil, PreTrainedTokenizerBase
from transformers.image_utils import SizeDict

from dflop_ds.data.conversation import (
    Conversation,
    MediaRef,
    TokenizedSample,
    check_tokenizer,
    parse_record,
    tokenize_conversation,
)
from dflop_ds.data.layout import MediaItem, MediaKind
from dflop_ds.data.media import clip_info, frame_indices, image_size, load_frames, load_image
from dflop_ds.data.records import open_records
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import MediaRule, media_rule
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
    pixel_values : Tensor of float32, shape (num_inputs, 3, tile_px, tile_px), or None
        None when the data set was asked for no pixels.
    """

    index: int
    sample_id: str
    input_ids: torch.Tensor
    labels: torch.Tensor
    media: tuple[MediaItem, ...]
    pixel_values: torch.Tensor | None


class LlavaDataset(Dataset[LoadedSample]):
    """Map-style data set over LLaVA conversation records.

    Parameters
    ----------
    records_path : str or Path
        ``.json`` (a list), ``.jsonl``, or a mixture of such files.
    media_root : str or Path
        Folder that relative media paths start from.
    tokenizer : PreTrainedTokenizerBase
        Fast, with a chat template.
    rule : MediaRule
        Of the model's family, see :func:`dflop_ds.families.media_rule`.
    image_processor : LlavaOnevisionImageProcessorPil
    max_frames : int
        Frames taken of one clip at most.
    frames_per_second : float
        Sampling rate of clips.
    load_pixels : bool
        False: media are looked at no further than their headers.
    seed : int
        Decides what a mixture draws.

    Raises
    ------
    ConfigError
        If tokenizer, image processor and rule do not belong together.
    DataError
        If the records cannot be read.
    """

    def __init__(
        self,
        records_path: str | Path,
        *,
        media_root: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        rule: MediaRule,
        image_processor: LlavaOnevisionImageProcessorPil,
        max_frames: int = DEFAULT_MAX_FRAMES,
        frames_per_second: float = DEFAULT_FRAMES_PER_SECOND,
        load_pixels: bool = True,
        seed: int = 0,
    ) -> None:
        if max_frames < 1 or not frames_per_second > 0:
            raise ConfigError(
                "a data set needs max_frames >= 1 and frames_per_second > 0, found "
                f"{max_frames} and {frames_per_second}; correct the settings."
            )
        check_tokenizer(tokenizer, rule.image_token_id, rule.video_token_id)
        size = image_processor.size
        if (size.get("height"), size.get("width")) != (rule.tile_px, rule.tile_px):
            raise ConfigError(
                f"the image processor must resize to the encoder's {rule.tile_px} x {rule.tile_px} px, "
                f"found {size}; "
                "use the preprocessor_config.json that belongs to the model."
            )
        self.records_path = Path(records_path)
        self.media_root = Path(media_root)
        self.tokenizer = tokenizer
        self.rule = rule
        self.image_processor = image_processor
        self.max_frames = max_frames
        self.frames_per_second = frames_per_second
        self.load_pixels = load_pixels
        self._records = open_records(records_path, seed)

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
        return self._records.fallback_id(index) if given is None else str(given)

    def shape(self, index: int) -> SampleShape:
        """Shape of a sample from media headers and its text, without decoding pixels.

        Raises
        ------
        DataError
            If the record or one of its media is unusable.
        """
        conversation = self._conversation(index)
        items = self._items(conversation)
        tokenized = self._tokenize(conversation, items)
        num_tokens = len(tokenized.input_ids)
        clips = sum(item.num_inputs for item in items if item.kind is MediaKind.CLIP)
        return SampleShape(
            sample_id=conversation.sample_id,
            num_tiles=sum(item.num_inputs for item in items) - clips,
            num_frames=clips,
            text_tokens=num_tokens - sum(item.num_tokens for item in items),
            llm_tokens=num_tokens,
            target_tokens=tokenized.target_tokens,
        )

    def media_paths(self, index: int) -> list[Path]:
        """Files that a sample needs, in the order of their placeholders."""
        return [self.media_root / ref.path for ref in self._conversation(index).media]

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
            path = self.media_root / ref.path
            _with_id(conversation.sample_id, self._frames if ref.is_clip else load_image, path)

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
            pixel_values=self._pixels(conversation, items) if self.load_pixels else None,
        )

    def without_pixels(self) -> LlavaDataset:
        """The same data set for ranks that need tokens and labels only."""
        light = copy.copy(self)
        light.load_pixels = False
        return light

    def fingerprint(self) -> str:
        """Checksum of everything but the media files that decides shapes."""
        parts = [
            *self._records.fingerprint(),
            str(self.media_root.resolve()),
            repr(self.rule),
            self.max_frames,
            self.frames_per_second,
            self.tokenizer.chat_template,
            cast(Any, self.tokenizer).backend_tokenizer.to_str(),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _conversation(self, index: int) -> Conversation:
        return parse_record(self._records[index], self.sample_id(index))

    def _items(self, conversation: Conversation) -> tuple[MediaItem, ...]:
        num_images = sum(not ref.is_clip for ref in conversation.media)
        return tuple(
            _with_id(conversation.sample_id, self._item, ref, num_images) for ref in conversation.media
        )

    def _item(self, ref: MediaRef, num_images: int) -> MediaItem:
        path = self.media_root / ref.path
        if ref.is_clip:
            info = clip_info(path)
            num_frames = len(
                frame_indices(info.num_frames, info.fps, self.frames_per_second, self.max_frames)
            )
            shape = self.rule.clip(num_frames)
            return MediaItem(MediaKind.CLIP, shape.num_inputs, info.height, info.width, shape.num_tokens)
        height, width = image_size(path)
        shape = self.rule.image(height, width, num_images)
        kind = MediaKind.TILED_IMAGE if num_images == 1 else MediaKind.WHOLE_IMAGE
        return MediaItem(kind, shape.num_inputs, height, width, shape.num_tokens)

    def _tokenize(self, conversation: Conversation, items: tuple[MediaItem, ...]) -> TokenizedSample:
        return tokenize_conversation(
            conversation,
            self.tokenizer,
            [item.num_tokens for item in items],
            image_token_id=self.rule.image_token_id,
            video_token_id=self.rule.video_token_id,
        )

    def _pixels(self, conversation: Conversation, items: tuple[MediaItem, ...]) -> torch.Tensor:
        paths = [self.media_root / ref.path for ref in conversation.media]
        images = [
            _with_id(conversation.sample_id, load_image, path)
            for path, item in zip(paths, items, strict=True)
            if item.kind is not MediaKind.CLIP
        ]
        tiles = iter(self._image_tiles(images))
        blocks = [torch.empty(0, 3, self.rule.tile_px, self.rule.tile_px)]
        for path, item in zip(paths, items, strict=True):
            is_clip = item.kind is MediaKind.CLIP
            block = _with_id(conversation.sample_id, self._clip_pixels, path) if is_clip else next(tiles)
            if tuple(block.shape) != (item.num_inputs, 3, self.rule.tile_px, self.rule.tile_px):
                raise DataError(
                    f"{path} must give {item.num_inputs} encoder inputs of {self.rule.tile_px} px by its "
                    f"header, found {tuple(block.shape)}; use the preprocessor_config.json that belongs to "
                    "the model.",
                    conversation.sample_id,
                )
            blocks.append(block)
        return torch.cat(blocks)

    def _image_tiles(self, images: list[Any]) -> list[torch.Tensor]:
        """Tiles of each image; images that share a sample are given together, as they are not cut then."""
        if not images:
            return []
        values = self.image_processor([images], return_tensors="pt")["pixel_values"]
        return list(cast(torch.Tensor, values).to(torch.float32))

    def _frames(self, path: Path) -> list[np.ndarray]:
        info = clip_info(path)
        return load_frames(
            path, frame_indices(info.num_frames, info.fps, self.frames_per_second, self.max_frames)
        )

    def _clip_pixels(self, path: Path) -> torch.Tensor:
        """Frames squeezed into the encoder's square, as the family's video processor does."""
        processor = self.image_processor
        size = SizeDict(height=self.rule.tile_px, width=self.rule.tile_px)
        frames = []
        for frame in self._frames(path):
            pixels = processor.resize(np.moveaxis(frame, -1, 0), size=size, resample=processor.resample)
            pixels = processor.rescale(pixels, processor.rescale_factor)
            frames.append(processor.normalize(pixels, processor.image_mean, processor.image_std))
        return torch.from_numpy(np.stack(frames)).to(torch.float32)


def _with_id(sample_id: str, function: Any, *arguments: Any) -> Any:
    """Call a function; its DataError is raised again with the sample's id."""
    try:
        return function(*arguments)
    except DataError as error:
        raise DataError(str(error), sample_id) from error


def from_pretrained_dir(
    model_dir: str | Path,
    records_path: str | Path,
    *,
    media_root: str | Path,
    max_frames: int = DEFAULT_MAX_FRAMES,
    frames_per_second: float = DEFAULT_FRAMES_PER_SECOND,
    load_pixels: bool = True,
    seed: int = 0,
) -> LlavaDataset:
    """Data set for the model in a local Hugging Face directory.

    Parameters
    ----------
    model_dir : str or Path
        Holds ``config.json``, ``tokenizer.json`` and ``preprocessor_config.json``; nothing is downloaded.
    records_path, media_root, max_frames, frames_per_second, load_pixels, seed
        As :class:`LlavaDataset`.

    Raises
    ------
    ConfigError
        If a file is missing or the files do not belong together.
    """
    model_dir = Path(model_dir)
    missing = [
        name for name in ("config.json", "preprocessor_config.json") if not (model_dir / name).is_file()
    ]
    if missing:
        raise ConfigError(
            f"{model_dir} must hold a Hugging Face model, found no {', '.join(missing)}; "
            "save the model's configuration, tokenizer and processor there."
        )
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        processor = LlavaOnevisionImageProcessorPil.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model_dir} must hold a readable configuration, tokenizer and preprocessor, found {error}; "
            "save them there again."
        ) from error
    rule = media_rule(config)
    pinpoints = [tuple(size) for size in processor.image_grid_pinpoints]
    if pinpoints != list(getattr(rule, "resolutions_px", pinpoints)):
        raise ConfigError(
            f"image_grid_pinpoints of {model_dir}/preprocessor_config.json must equal those of config.json, "
            "found others; the model cannot arrange the tiles otherwise."
        )
    return LlavaDataset(
        records_path,
        media_root=media_root,
        tokenizer=tokenizer,
        rule=rule,
        image_processor=processor,
        max_frames=max_frames,
        frames_per_second=frames_per_second,
        load_pixels=load_pixels,
        seed=seed,
    )
