"""The model of a configuration: its family's layers, and the local stage with its weights."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

from transformers import AutoConfig

from dflop_ds.config import DflopConfig
from dflop_ds.errors import ConfigError, ModelError
from dflop_ds.families import family_of, import_families
from dflop_ds.models.attention import resolve_backend
from dflop_ds.models.export import whole_model_shapes
from dflop_ds.models.layers import LayerPlan
from dflop_ds.models.selection import build_without_memory
from dflop_ds.models.weights import (
    Checkpoint,
    check_weights,
    has_own_head,
    load_layers,
    uninitialised,
    untie,
)
from dflop_ds.runtime import costs, distributed
from dflop_ds.runtime.finetune import checkpoint_function
from dflop_ds.runtime.module import DflopPipelineModule

logger = logging.getLogger(__name__)


def read_model_config(config: DflopConfig) -> Any:
    """``transformers`` configuration of the model directory."""
    import_families(config.model.family_module)
    try:
        model_config = AutoConfig.from_pretrained(config.model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dflop.model.path must be a local Hugging Face directory, found {config.model.path}: {error}. "
            "Set it to a directory with config.json (`dflop-ds demo-data` makes a tiny one)."
        ) from error
    if getattr(model_config, "tie_word_embeddings", False) and config.model.weights != "random":
        _untie_own_head(config, model_config)
    return model_config


def _untie_own_head(config: DflopConfig, model_config: Any) -> None:
    """Let the weights decide, as ``transformers`` does, where they contradict tied embeddings."""
    if not Checkpoint.exists(config.model.path or ""):
        return
    if has_own_head(_open_weights(config, model_config)):
        logger.warning(
            "config.json of %s ties input and output embeddings, but the weights differ: they are not tied.",
            config.model.path,
        )
        untie(model_config)


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
    if distributed.together(lambda: is_pretrained(config)):
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


def is_pretrained(config: DflopConfig) -> bool:
    """Whether initial weights come from the model directory.

    Raises
    ------
    ModelError
        If this is left to the directory, and it holds weights in another format.
    """
    path, weights = config.model.path or "", config.model.weights
    others = Checkpoint.other_weights(path)
    if weights == "auto" and others:
        raise ModelError(
            f"{path} must hold weights as one model.safetensors, or shards with their index, or none, found "
            f"{', '.join(others)}; save the model there with save_pretrained of transformers, or set "
            'dflop.model.weights to "random".'
        )
    return weights == "pretrained" or (weights == "auto" and Checkpoint.exists(path))


def _open_weights(config: DflopConfig, model_config: Any) -> Checkpoint:
    names = family_of(model_content(model_config)).published_names
    return Checkpoint(config.model.path or "", names)


def _checked_weights(config: DflopConfig, model_config: Any, plans: list[LayerPlan]) -> Checkpoint:
    """Open the weights; every rank looks at the headers of all of them, so that all name the same faults."""
    source = _open_weights(config, model_config)
    check_weights(build_without_memory(plans), source, also_known=whole_model_shapes(model_config))
    return source
