"""What verbs that predict ask of a configuration: what it trains, and in which type."""

from __future__ import annotations

from typing import Any

from dflop_ds.config import DflopConfig, uses_bf16
from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.profiling.table import ProfileTable


def note_other_dtype(profile: ProfileTable, ds_config: dict[str, Any]) -> None:
    """Say so where a profile was measured in another type than the one that trains."""
    trained = "bfloat16" if uses_bf16(ds_config) else "float32"
    if profile.fingerprint.dtype != trained:
        print(
            f"layer times are of {profile.fingerprint.dtype}, the configuration trains in {trained}: measure "
            "them again with `dflop-ds profile model`."
        )


def configured_training(ds_config: dict[str, Any], config: DflopConfig) -> tuple[LayerTraining, ...] | None:
    """What is trained of each layer; patterns are resolved against the model as training does it."""
    if not config.finetune.freeze and config.finetune.lora is None:
        return None
    from dflop_ds.runtime.finetune import plan_finetuning
    from dflop_ds.runtime.model_setup import layer_plans, read_model_config

    plans = layer_plans(ds_config, config, read_model_config(config))
    finetuning = plan_finetuning(config.finetune, plans)
    return None if finetuning is None else finetuning.layers
