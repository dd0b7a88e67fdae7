"""Dimensions of the smallest demo model that has two layers of every kind."""

from dflop_ds.data.demo_model import TinyModelDims

TINY_DIMS = TinyModelDims(
    grid_side=3,
    vision_hidden=32,
    vision_intermediate=48,
    vision_layers=2,
    vision_heads=2,
    text_hidden=48,
    text_intermediate=64,
    text_layers=2,
    text_heads=4,
    text_kv_heads=2,
)
