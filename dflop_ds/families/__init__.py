"""Model families: what each tells without torch (tiles, frames, tokens from sizes), and where the rest is.

Every family of the package is one file here that ends with its registry entry.
"""

from __future__ import annotations

from dflop_ds.families import internvl, llava_onevision, qwen2_5_vl, qwen2_audio
from dflop_ds.families.base import MediaItem, MediaKind, MediaRule, Modality, Placeholder
from dflop_ds.families.registry import (
    Family,
    family_of,
    import_families,
    media_rule,
    model_dims,
    register_family,
)

__all__ = [
    "Family",
    "MediaItem",
    "MediaKind",
    "MediaRule",
    "Modality",
    "Placeholder",
    "family_of",
    "import_families",
    "media_rule",
    "model_dims",
    "register_family",
]

for _module in (internvl, llava_onevision, qwen2_5_vl, qwen2_audio):
    register_family(_module.FAMILY)
