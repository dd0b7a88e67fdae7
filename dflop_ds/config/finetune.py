"""What is trained of the model, and how fast: ``dflop.finetune``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from dflop_ds.config.base import Block, NonEmptyStr, PositiveInt

Patterns = Annotated[list[NonEmptyStr], Field(min_length=1)]


class ParamGroup(Block):
    """One entry of ``dflop.finetune.param_groups``: parameters with their own optimizer settings."""

    match: Patterns = Field(description="Modules or parameters of the group, as in dflop.finetune.freeze.")
    lr: float | None = Field(
        default=None, ge=0, description="Learning rate of the group. null: that of the optimizer."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay of the group. null: that of the optimizer."
    )

    @model_validator(mode="after")
    def _sets_something(self) -> ParamGroup:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(f"the group of {self.match} must set lr or weight_decay; found neither. Add one")
        return self


class LoraSettings(Block):
    """``dflop.finetune.lora``: low-rank adapters beside frozen weights."""

    match: Patterns = Field(
        description="Modules or parameters, as in dflop.finetune.freeze, whose linear layers get an adapter; "
        "the output head never does."
    )
    rank: PositiveInt = Field(default=8, description="Rank of the adapters (r of peft).")
    alpha: float = Field(default=16.0, gt=0, description="The adapter's output is scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    also_train: list[NonEmptyStr] = Field(
        default_factory=list,
        description="Modules or parameters that are trained as a whole beside the adapters; all other "
        "weights are frozen.",
    )


class FinetuneConfig(Block):
    """``dflop.finetune``: which part of the model is trained."""

    freeze: list[NonEmptyStr] = Field(
        default_factory=list,
        description="Parts that keep their weights: modules (encoder, projector, llm, llm.embed, "
        "llm.layers.3, ...) or glob patterns over Hugging Face parameter names (*.bias).",
    )
    lora: LoraSettings | None = Field(
        default=None, description="Train low-rank adapters (needs peft). null: none."
    )
    param_groups: list[ParamGroup] = Field(
        default_factory=list,
        description="Own learning rate or weight decay by module or pattern; the first group that matches "
        "a parameter has it, and what none matches has the optimizer's settings.",
    )
