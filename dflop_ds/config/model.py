"""Which model is trained, and how it is cut into stages: ``dflop.model``, ``dflop.parallel``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dflop_ds.config.base import Block, NonEmptyStr, PositiveInt


class ModelConfig(Block):
    """``dflop.model``: which model is trained."""

    path: NonEmptyStr | None = Field(
        default=None,
        description="Local Hugging Face directory with config.json, the tokenizer and the preprocessor. "
        "Required by the training entry point.",
    )
    weights: Literal["auto", "pretrained", "random"] = Field(
        default="auto",
        description="Where the initial weights come from. auto: pretrained if the directory holds "
        "safetensors files, random if it holds no weights.",
    )
    family_module: NonEmptyStr | None = Field(
        default=None,
        description="Python module that registers the model's family, for families outside of this package; "
        "imported on every rank before config.json is read. null: the families of this package.",
    )
    attention: Literal["auto", "segments", "varlen"] = Field(
        default="auto",
        description="Attention over the packed samples of a microbatch. segments: one call per sample, on "
        "any device. varlen: one variable-length kernel, CUDA only. auto: the fastest that the device has.",
    )


class ParallelConfig(Block):
    """``dflop.parallel``: how the model is cut into pipeline stages."""

    pipeline_stages: PositiveInt | Literal["auto"] = Field(
        default="auto",
        description="Number of pipeline stages; the number of ranks must be a multiple of it. auto: all "
        "ranks form one pipeline if there are at most 2, otherwise an explicit number is required.",
    )
    split: Literal["auto", "parameters", "uniform"] | Annotated[list[PositiveInt], Field(min_length=1)] = (
        Field(
            default="auto",
            description="How layers are divided among stages. auto: balanced by predicted time. parameters: "
            "balanced by parameter count. uniform: by layer count. A list gives the number of layers of "
            "each stage, first stage first.",
        )
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )

    @model_validator(mode="after")
    def _split_matches_stages(self) -> ParallelConfig:
        if isinstance(self.split, list) and self.pipeline_stages != len(self.split):
            raise ValueError(
                "a split given as a list must have one entry per stage: pipeline_stages is "
                f"{self.pipeline_stages!r}, the list has {len(self.split)}. "
                f"Set pipeline_stages to {len(self.split)} or change the list"
            )
        return self
