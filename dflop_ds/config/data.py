"""Which samples are read and how the loss averages them: ``dflop.data``, ``dflop.loss``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflop_ds.config.base import Block, NonEmptyStr, PositiveInt


class DataConfig(Block):
    """``dflop.data``: which samples are read, and what happens to unusable ones."""

    train_path: NonEmptyStr | None = Field(
        default=None,
        description="LLaVA-style JSON or JSONL file of training samples, a mixture of such files "
        "(YAML or JSON), or a data set saved by the package datasets (a folder or .parquet), see "
        "docs/data.md. Required by the training entry point.",
    )
    eval_path: NonEmptyStr | None = Field(
        default=None, description="Same, for evaluation. null: no evaluation."
    )
    media_root: NonEmptyStr | None = Field(
        default=None, description="Folder that media paths are relative to. null: the folder of train_path."
    )
    streaming: bool = Field(
        default=False,
        description="Read train_path, a data set saved by the package datasets, as a stream: nothing is "
        "scanned before training.",
    )
    stream_window: PositiveInt = Field(
        default=4,
        description="Global batches of a stream that are read ahead, shuffled and planned together (count).",
    )
    max_frames: PositiveInt = Field(
        default=32, description="Upper limit of frames taken from one video (count)."
    )
    frames_per_second: float = Field(
        default=1.0,
        gt=0,
        description="Sampling rate of videos, in frames per second of film, up to max_frames.",
    )
    long_audio: Literal["cut", "refuse"] = Field(
        default="cut",
        description="What happens to a recording that is longer than the model's window (30 s). cut: its "
        "beginning is used, as the model's processor does, with a warning. refuse: its sample is broken.",
    )
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="Longest LLM sequence of one sample, in tokens, media tokens included. Longer samples "
        "are oversized. null: no limit but that of a microbatch.",
    )
    broken: Literal["error", "drop"] = Field(
        default="error", description="What happens to a sample whose text or media cannot be read."
    )
    oversized: Literal["error", "drop"] = Field(
        default="error", description="What happens to a sample that exceeds max_tokens or fits no microbatch."
    )
    scan: Literal["headers", "decode"] = Field(
        default="headers",
        description="How sample sizes are found before training. headers: file headers only. decode: "
        "decode every file, which also finds damaged ones, and takes far longer.",
    )
    tail: Literal["partial", "drop"] = Field(
        default="partial",
        description="What happens to the last, incomplete global batch of an epoch. partial: a smaller "
        "step. drop: skipped.",
    )
    shuffle: bool = Field(
        default=True, description="Draw a new order each epoch, from the seed and the epoch."
    )
    num_workers: int = Field(
        default=2, ge=0, description="Loader processes per rank (count). 0: load in the rank."
    )
    shape_cache: NonEmptyStr | None = Field(
        default=None, description="NPZ file that keeps the sample sizes between runs. null: not kept."
    )
    scan_processes: PositiveInt = Field(default=1, description="Processes that scan the data set (count).")


class LossConfig(Block):
    """``dflop.loss``: what is averaged over the global batch."""

    reduction: Literal["token", "sample"] = Field(
        default="token",
        description="token: mean over all supervised tokens of the global batch. sample: mean over samples "
        "of each sample's token mean.",
    )
