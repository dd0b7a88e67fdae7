"""What all blocks of the configuration share: strictness and common types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonEmptyStr = Annotated[str, Field(min_length=1)]


class Block(BaseModel):
    """Base of every block: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
