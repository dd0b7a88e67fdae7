"""Small planning problems."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflop_ds.flops import LlmDims, ModelDims, VisionDims
from dflop_ds.planning.analytic import analytic_layer_model, analytic_memory_model, model_layers
from dflop_ds.planning.hardware import PRESETS, Hardware
from dflop_ds.planning.model import ModelCosts
from dflop_ds.planning.workload import Workload
from dflop_ds.shapes import SampleShape, ShapeTable

DIMS = ModelDims(
    vision=VisionDims(512, 2048, 8, 3, 224, 14),
    llm=LlmDims(1024, 4096, 16, 8, 64, 4, 32000),
)


def mixed_table(num_samples: int, seed: int = 0) -> ShapeTable:
    """A quarter of texts; images and clips of 1 to 16 tiles, texts of log-normal length."""
    rng = np.random.default_rng(seed)
    shapes = []
    for index in range(num_samples):
        tiles = 0 if rng.random() < 0.25 else int(rng.integers(1, 17))
        text = int(rng.lognormal(5.0, 0.8)) + 8
        shapes.append(SampleShape(f"s{index}", tiles, 0, text, text + 196 * tiles, text // 2 + 1))
    return ShapeTable.from_shapes(shapes)


def equal_table(num_samples: int) -> ShapeTable:
    """Equal samples with two tiles each."""
    return ShapeTable.from_shapes(SampleShape(f"s{i}", 2, 0, 108, 500, 50) for i in range(num_samples))


def small_workload(
    table: ShapeTable | None = None,
    batch_size: int = 16,
    *,
    hardware: Hardware | None = None,
    dims: ModelDims = DIMS,
    num_batches: int = 2,
    seed: int = 0,
    **options: Any,
) -> Workload:
    """A workload with analytic times; `options` are fields of the model."""
    hardware = hardware or PRESETS["a100-80g"]
    model = ModelCosts(
        tuple(model_layers(dims)),
        times=analytic_layer_model(dims, hardware, "bfloat16"),
        memory=analytic_memory_model(dims, 2),
        measured=False,
        **options,
    )
    table = mixed_table(64) if table is None else table
    return Workload(model, table, batch_size, hardware=hardware, num_batches=num_batches, seed=seed)
