"""A checkpoint folder without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def write_checkpoint(directory: Path, step: int = 4) -> Path:
    """Two layers, of which the second shares the first one's weights, on one rank under ZeRO-1."""
    directory.mkdir(parents=True)
    main: dict[str, Any] = {
        "num_ranks": 1,
        "model": None,
        "family_module": None,
        "layout": {"boundaries": [0, 2], "num_replicas": 1, "layer_kinds": ["token_embed", "head"]},
        "position": {"step": step},
        "plans": [],
        "correction": None,
    }
    rank: dict[str, Any] = {
        "stage": 0,
        "layers": {"0": {"weight": "model.embed.weight"}},
        "optimizer": {"file": OPTIMIZER, "parameters": {}, "kind": "AdamW"},
        "random": {},
        "planning": None,
        "num_measured_steps": 0,
    }
    for name, content in (("dflop.json", main), ("dflop-rank00000.json", rank)):
        (directory / name).write_text(json.dumps({"schema_version": 1, **content}))
    for name in ("layer_00-model_states.pt", "mp_rank_00_model_states.pt", OPTIMIZER):
        torch.save({"weight": torch.zeros(2)}, directory / name)
    return directory
