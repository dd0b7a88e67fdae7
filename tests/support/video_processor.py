"""The size rules of a video processor of ``transformers`` on a machine without torchvision."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import transformers

_TORCHVISION = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def qwen2_vl_video_source() -> Any:
    """Module of ``Qwen2VLVideoProcessor`` with an empty torchvision: it counts, but cannot resize."""
    path = Path(transformers.__file__).parent / "models/qwen2_vl/video_processing_qwen2_vl.py"
    spec = importlib.util.spec_from_file_location("transformers.models.qwen2_vl.video_source", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stubs: dict[str, types.ModuleType] = {name: types.ModuleType(name) for name in _TORCHVISION}
    with mock.patch.dict(sys.modules, {**stubs, spec.name: module}):
        spec.loader.exec_module(module)
    return module
