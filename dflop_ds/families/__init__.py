"""Per model family, without torch: tiles, frames and tokens from sizes and durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dflop_ds.errors import ConfigError
from dflop_ds.families.base import MediaRule, MediaShape
from dflop_ds.families.llava_onevision import LlavaOnevisionRule

__all__ = ["MediaRule", "MediaShape", "media_rule"]

_RULES: dict[str, Callable[[Mapping[str, Any]], MediaRule]] = {
    "llava_onevision": LlavaOnevisionRule.from_config,
}


def media_rule(config: Mapping[str, Any]) -> MediaRule:
    """Media rule of a model.

    Parameters
    ----------
    config : dict
        Content of the model's Hugging Face ``config.json``.

    Returns
    -------
    MediaRule

    Raises
    ------
    ConfigError
        If the model type is unknown or its configuration is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in _RULES:
        raise ConfigError(
            f"model_type in config.json must be one of {sorted(_RULES)}, found {model_type!r}; "
            "use a model of a supported family."
        )
    return _RULES[model_type](config)
