"""All models that are compared; a family adds the list of its module."""

from __future__ import annotations

from benchmarks.parity import internvl, llava_onevision, qwen2_audio
from benchmarks.parity.compare import Variant

VARIANTS: list[Variant] = [*llava_onevision.VARIANTS, *internvl.VARIANTS, *qwen2_audio.VARIANTS]
