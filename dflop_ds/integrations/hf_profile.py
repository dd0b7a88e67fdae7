"""Microbatch costs from a file: of an earlier run, or fitted to a profile of ``dflop-ds profile model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.cost.files import read_json
from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes, fit_microbatch_cost
from dflop_ds.cost.model import CostModel, LayerCostModel
from dflop_ds.errors import CostModelError
from dflop_ds.families import model_dims
from dflop_ds.planning.analytic import model_layers
from dflop_ds.profiling.table import ProfileTable
from dflop_ds.shapes import ShapeTable

_NUM_BINS = 256


def load_cost(path: str | Path, model_config: Any, table: ShapeTable, samples_per_bin: int) -> MicrobatchCost:
    """Costs of one microbatch of the whole model.

    A profile of layers is turned into the four numbers of a microbatch by a fit to its predictions for random
    microbatches of the data.

    Parameters
    ----------
    path : str or Path
        JSON written by ``save_profile`` or by ``dflop-ds profile model``.
    model_config : PreTrainedConfig
    table : ShapeTable
    samples_per_bin : int

    Raises
    ------
    CostModelError
        If the file is damaged, or times other layers than the model has.
    """
    if "rows" not in read_json(path, "profile"):
        return MicrobatchCost.load(path)
    rows = ProfileTable.load(path).rows
    dims = model_dims(model_config.to_dict())
    kinds = model_layers(dims)
    missing = sorted(set(kinds) - {row.kind for row in rows})
    if missing:
        raise CostModelError(
            f"{path} must time every layer kind of the model, found no rows of {missing}. Profile it again, "
            "or leave profile out to measure while training."
        )
    model = CostModel(LayerCostModel(warn=False).fit(rows, dims), [kinds])
    rng = np.random.default_rng(0)
    bins = rng.integers(0, len(table), (_NUM_BINS, samples_per_bin)).tolist()
    features = MicrobatchFeatures.from_bins(table, bins)
    seconds = np.add(*model.stage_times(features))
    sizes = (features.llm_tokens, features.sum_squared_tokens, features.encoder_inputs)
    columns = MicrobatchSizes(*(column[:, None] for column in sizes))
    return fit_microbatch_cost(columns, seconds, waits_for_slowest=False)
