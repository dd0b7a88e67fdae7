"""Data-aware pipeline training of multimodal LLMs on stock DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop_ds.runtime.initialize import initialize
    from dflop_ds.runtime.setup import prepare

__version__ = "0.1.0"
__all__ = ["__version__", "initialize", "prepare"]


def __getattr__(name: str) -> Any:
    # torch and DeepSpeed are imported only when training is set up.
    if name == "initialize":
        from dflop_ds.runtime.initialize import initialize

        return initialize
    if name == "prepare":
        from dflop_ds.runtime.setup import prepare

        return prepare
    raise AttributeError(f"module 'dflop_ds' has no attribute {name!r}")
