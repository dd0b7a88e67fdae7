"""What is trained of the model, and how fast: ``dflop.finetune``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from dflop_ds.config.base import Block, NonEmptyStr

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


class FinetuneConfig(Block):
    """``dflop.finetune``: which part of the model is trained."""

    freeze: list[NonEmptyStr] = Field(
        default_factory=list,
        description="Parts that keep their weights: modules (encoder, projector, llm, llm.embed, "
        "llm.layers.3, ...) or glob patterns over Hugging Face parameter names (*.bias).",
    )
    param_groups: list[ParamGroup] = Field(
        default_factory=list,
        description="Own learning rate or weight decay by module or pattern; the first group that matches "
        "a parameter has it, and what none matches has the optimizer's settings.",
    )
