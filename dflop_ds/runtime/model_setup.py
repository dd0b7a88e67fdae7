"""The model of a configuration: its family's layers, and the local stage with its weights."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from transformers import AutoConfig

from dflop_ds.config import DflopConfig
from dflop_ds.errors import ConfigError
from dflop_ds.families import family_of, import_families
from dflop_ds.models.attention import resolve_backend
from dflop_ds.models.export import whole_model_shapes
from dflop_ds.models.layers import LayerPlan
from dflop_ds.models.selection import build_without_memory
from dflop_ds.models.weights import Checkpoint, check_weights, load_layers, uninitialised
from dflop_ds.runtime import costs, distributed
from dflop_ds.runtime.finetune import checkpoint_function
from dflop_ds.runtime.module import DflopPipelineModule


def read_model_config(config: DflopConfig) -> Any:
    """``transformers`` configuration of the model directory."""
    import_families(config.model.family_module)
    try:
        return AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dflop.model.path must be a local Hugging Face directory, found {config.model.path}: {error}. "
            "Set it to a directory with config.json (`dflop-ds demo-data` makes a tiny one)."
        ) from error


def model_content(model_config: Any) -> dict[str, Any]:
    """The model configuration with all its defaults written out."""
    return dict(json.loads(model_config.to_json_string(use_diff=False)))


def layer_plans(ds_config: dict[str, Any], config: DflopConfig, model_config: Any) -> list[LayerPlan]:
    """Plans of the model's pipeline layers."""
    attention = resolve_backend(config.model.attention, distributed.device(), costs.compute_dtype(ds_config))
    family = family_of(model_content(model_config))
    plans: list[LayerPlan] = family.pipeline_layers(model_config, attention=attention, seed=config.seed)
    return plans


def build_module(
    config: DflopConfig,
    model_config: Any,
    plans: list[LayerPlan],
    num_stages: int,
    boundaries: list[int] | None,
    reentrant: bool = False,
) -> DflopPipelineModule:
    """Build the local stage and load its weights."""
    split = config.parallel.split
    checkpointed = config.parallel.activation_checkpointing
    source = None
    if _is_pretrained(config):
        source = distributed.together(lambda: _checked_weights(config, model_config, plans))
    with contextlib.nullcontext() if source is None else uninitialised():
        model = DflopPipelineModule(
            plans,
            num_stages=num_stages,
            boundaries=boundaries,
            partition_method=split if split in ("parameters", "uniform") else "parameters",
            activation_checkpoint_interval=1 if checkpointed else 0,
            activation_checkpoint_func=checkpoint_function(reentrant),
        )
    if source is not None:
        distributed.together(lambda: load_layers(model.local_layers(), source))
    return model


def _is_pretrained(config: DflopConfig) -> bool:
    if config.model.weights == "auto":
        return Checkpoint.exists(config.model.path or "")
    return config.model.weights == "pretrained"


def _checked_weights(config: DflopConfig, model_config: Any, plans: list[LayerPlan]) -> Checkpoint:
    """Open the weights; every rank looks at the headers of all of them, so that all name the same faults."""
    names = family_of(model_content(model_config)).published_names
    source = Checkpoint(config.model.path or "", names)
    check_weights(build_without_memory(plans), source, also_known=whole_model_shapes(model_config))
    return source
