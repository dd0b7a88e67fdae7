"""All models that are compared; a family adds the list of its module."""

from __future__ import annotations

from benchmarks.parity import internvl, llava_onevision, qwen2_5_vl, qwen2_audio
from benchmarks.parity.compare import Variant

_MODULES = (llava_onevision, internvl, qwen2_5_vl, qwen2_audio)

VARIANTS: list[Variant] = [variant for module in _MODULES for variant in module.VARIANTS]
