"""What verbs that predict read of a training configuration: the model, what is trained, in which type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop_ds.config import DflopConfig, reduce_bucket_values, uses_bf16
from dflop_ds.cost.files import read_json
from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.memory import MemoryModel
from dflop_ds.errors import ConfigError, CostModelError
from dflop_ds.families import model_dims
from dflop_ds.flops import ModelDims
from dflop_ds.planning.analytic import analytic_layer_model, analytic_memory_model, model_layers
from dflop_ds.planning.hardware import Hardware
from dflop_ds.planning.model import ModelCosts
from dflop_ds.profiling.table import ProfileTable


def read_model_config(config: DflopConfig, path: Path | None = None) -> dict[str, Any]:
    """The model's config.json at `path`, by default in ``dflop.model.path``."""
    if path is None:
        if config.model.path is None:
            raise ConfigError("dflop.model.path must name a local model directory, found null. Set it.")
        path = Path(config.model.path) / "config.json"
    return read_json(path, "model config")


def measured_costs(
    ds_config: dict[str, Any],
    config: DflopConfig,
    model_config: Mapping[str, Any],
    profiles: Mapping[int, ProfileTable],
    *,
    warn: bool = True,
) -> ModelCosts:
    """Costs of the model by its profiles.

    Parameters
    ----------
    ds_config : dict
    config : DflopConfig
    model_config : mapping
    profiles : mapping of int to ProfileTable
        By tensor-parallel degree, with one of a single GPU.
    warn : bool
        Log where predictions leave the profiled range.

    Raises
    ------
    CostModelError
        If a profile is of another model or lacks a layer kind.
    """
    dims = model_dims(model_config)
    layers = model_layers(dims)
    for profile in profiles.values():
        profile.check_model(model_config, layers)
    whole = profiles[1]
    _note_other_dtype(whole, ds_config)
    times = {
        degree: LayerCostModel(warn=warn).fit(profile.rows, dims) for degree, profile in profiles.items()
    }
    return ModelCosts(
        layers=tuple(layers),
        times=times.pop(1),
        memory=_profiled_memory(whole, dims, _value_bytes(ds_config)),
        value_bytes=_value_bytes(ds_config),
        reduce_bucket_values=reduce_bucket_values(ds_config),
        profiled_checkpointing=whole.fingerprint.activation_checkpointing,
        training=_configured_training(ds_config, config),
        tensor_times=times,
    )


def unmeasured_costs(
    ds_config: dict[str, Any], config: DflopConfig, model_config: Mapping[str, Any], hardware: Hardware
) -> ModelCosts:
    """Costs of the model by formulas and a data sheet."""
    dims = model_dims(model_config)
    value_bytes = _value_bytes(ds_config)
    return ModelCosts(
        layers=tuple(model_layers(dims)),
        times=analytic_layer_model(dims, hardware, "bfloat16" if uses_bf16(ds_config) else "float32"),
        memory=analytic_memory_model(dims, value_bytes),
        value_bytes=value_bytes,
        reduce_bucket_values=reduce_bucket_values(ds_config),
        measured=False,
        training=_configured_training(ds_config, config),
    )


def _value_bytes(ds_config: dict[str, Any]) -> int:
    return 2 if uses_bf16(ds_config) else 4


def _profiled_memory(profile: ProfileTable, dims: ModelDims, value_bytes: int) -> MemoryModel:
    """Memory model of the profile, or the analytic one where the profile has no bytes."""
    try:
        profiled_bytes = 2 if profile.fingerprint.dtype == "bfloat16" else 4
        return MemoryModel(profile.rows, profile.parameters, dims, profiled_bytes)
    except CostModelError as error:
        print(f"memory by formulas instead of the profile: {error}")
        return analytic_memory_model(dims, value_bytes)


def _note_other_dtype(profile: ProfileTable, ds_config: dict[str, Any]) -> None:
    trained = "bfloat16" if uses_bf16(ds_config) else "float32"
    if profile.fingerprint.dtype != trained:
        print(
            f"layer times are of {profile.fingerprint.dtype}, the configuration trains in {trained}: measure "
            "them again with `dflop-ds profile model`."
        )


def _configured_training(ds_config: dict[str, Any], config: DflopConfig) -> tuple[LayerTraining, ...] | None:
    """What is trained of each layer; patterns are resolved against the model as training does it."""
    if not config.finetune.freeze and config.finetune.lora is None:
        return None
    from dflop_ds.runtime import model_setup
    from dflop_ds.runtime.finetune import plan_finetuning

    plans = model_setup.layer_plans(ds_config, config, model_setup.read_model_config(config))
    finetuning = plan_finetuning(config.finetune, plans)
    return None if finetuning is None else finetuning.layers
