"""Layer kinds of one model each, since no model has all of them."""

from __future__ import annotations

from dflop_ds.cost.features import LAYER_KINDS

_NATIVE_BLOCKS = ("vision_window_block", "vision_frame_block")

TILED_KINDS = tuple(kind for kind in LAYER_KINDS if kind not in _NATIVE_BLOCKS)
"""Of a model whose encoder takes fixed tiles."""

NATIVE_KINDS = tuple(kind for kind in LAYER_KINDS if kind != "vision_block")
"""Of a model whose encoder takes images at their own resolution."""
