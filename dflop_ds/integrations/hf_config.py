"""Settings of the Trainer callback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflop_ds.config.explain import explain
from dflop_ds.errors import ConfigError


class TrainerCallbackConfig(BaseModel):
    """How the callback learns the sizes of the samples and what it may do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shapes: str | None = Field(
        None, description="Shape table (NPZ) of the data set, as written by `dflop-ds profile data`."
    )
    length_column: str | None = Field(
        None,
        description="Column with the LLM tokens of each sample; default: the Trainer's length_column_name.",
    )
    profile: str | None = Field(
        None,
        description="Costs (JSON) of `save_profile` or `dflop-ds profile model`; default: measured.",
    )
    save_profile: str | None = Field(
        None, description="Where rank 0 writes the microbatch costs that it has measured (JSON)."
    )
    warmup_steps: int = Field(
        8,
        ge=1,
        description="Optimizer steps in data-blind order that are measured when there is no profile.",
    )
    collator: Literal["auto", "padded", "packed"] = Field(
        "auto",
        description="Whether the data collator pads to the longest sample or packs samples into one row; "
        "'auto' tries it on two samples.",
    )
    policy: Literal["lpt", "cp_sat", "blind"] = Field(
        "lpt", description="Longest first with exchanges, improved by CP-SAT, or the Trainer's own bins."
    )
    sync: Literal["auto", "step", "microbatch", "phase"] = Field(
        "auto",
        description="Where ranks wait for others: once per step (DDP, ZeRO 1), per microbatch (ZeRO 2) or "
        "within a microbatch (ZeRO 3); 'auto' follows the ZeRO stage.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Hard limit of LLM tokens in a microbatch, padding included."
    )
    max_encoder_inputs: int | None = Field(
        None, ge=1, description="Hard limit of tiles plus frames in a microbatch."
    )


def parse_config(content: Mapping[str, Any]) -> TrainerCallbackConfig:
    """Validate settings.

    Raises
    ------
    ConfigError
        Naming each wrong key or value.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"config must be a mapping of settings, found a {type(content).__name__}. Use from_config "
            "for a file."
        )
    try:
        return TrainerCallbackConfig.model_validate(dict(content))
    except ValidationError as error:
        raise ConfigError(explain(error, TrainerCallbackConfig, "callback")) from error


def load_config(path: str | Path) -> TrainerCallbackConfig:
    """Read settings from a JSON file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a value is wrong.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} must be a readable JSON file; {error}. Correct the path or the file."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold one JSON object, found a {type(content).__name__}. Correct the file."
        )
    return parse_config(content)
