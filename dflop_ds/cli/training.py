"""What a configuration trains of each layer, for verbs that predict."""

from __future__ import annotations

from typing import Any

from dflop_ds.config import DflopConfig
from dflop_ds.cost.gradients import LayerTraining


def configured_training(ds_config: dict[str, Any], config: DflopConfig) -> tuple[LayerTraining, ...] | None:
    """What is trained of each layer; patterns are resolved against the model as training does it."""
    if not config.finetune.freeze and config.finetune.lora is None:
        return None
    from dflop_ds.runtime.finetune import plan_finetuning
    from dflop_ds.runtime.model_setup import layer_plans, read_model_config

    plans = layer_plans(ds_config, config, read_model_config(config))
    finetuning = plan_finetuning(config.finetune, plans)
    return None if finetuning is None else finetuning.layers
