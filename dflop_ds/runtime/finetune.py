"""Which parameters are trained, resolved for the whole model and applied to the local stage."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from dflop_ds.config import FinetuneConfig
from dflop_ds.cost.gradients import LayerTraining, layer_training
from dflop_ds.errors import ConfigError
from dflop_ds.models.layers import LayerPlan, PipelineLayer
from dflop_ds.models.lora import Adapters, adapter_weights
from dflop_ds.models.selection import NamedWeight, build_without_memory, named_weights, select

logger = logging.getLogger(__name__)

_FREEZE_KEY = "dflop.finetune.freeze"
_LORA_KEY = "dflop.finetune.lora"
GROUPS_KEY = "dflop.finetune.param_groups"


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """What is trained of the whole model; the same on every rank.

    Attributes
    ----------
    frozen : frozenset of str
        Hugging Face names of the parameters that keep their values.
    layers : tuple of LayerTraining
        State of every pipeline layer.
    groups : tuple of (frozenset of str, dict)
        Names of the parameters with own optimizer settings, and these; the first match counts.
    adapters : Adapters or None
    """

    frozen: frozenset[str]
    layers: tuple[LayerTraining, ...]
    groups: tuple[tuple[frozenset[str], dict[str, float]], ...] = ()
    adapters: Adapters | None = None


def plan_finetuning(config: FinetuneConfig, plans: Sequence[LayerPlan], seed: int = 0) -> Finetuning | None:
    """Resolve the patterns of a configuration against the whole model.

    Parameters
    ----------
    config : FinetuneConfig
    plans : sequence of LayerPlan
    seed : int
        Of the initial adapters.

    Returns
    -------
    Finetuning or None
        None where the block is empty: everything is trained alike.

    Raises
    ------
    ConfigError
        If a pattern matches nothing, a group gets no parameter, or nothing is left to train.
    """
    if config == FinetuneConfig():
        return None
    layers = build_without_memory(plans)
    weights = named_weights(plans, layers)
    frozen = select(config.freeze, weights, _FREEZE_KEY) | _constants(layers)
    adapters = None
    if config.lora is not None:
        chosen = adapter_weights(layers, select(config.lora.match, weights, f"{_LORA_KEY}.match"))
        adapters = Adapters(config.lora, chosen, seed)
        kept = select(config.lora.also_train, weights, f"{_LORA_KEY}.also_train")
        frozen |= {weight.name for weight in weights} - kept
        for index, layer in enumerate(layers):
            adapters.inject(layer, index)
        weights = named_weights(plans, layers)
    groups = tuple(
        (
            select(group.match, weights, f"{GROUPS_KEY}[{number}].match"),
            group.model_dump(include={"lr", "weight_decay"}, exclude_none=True),
        )
        for number, group in enumerate(config.param_groups)
    )
    _require_used(groups, frozen)
    return Finetuning(frozen, _layer_states(weights, len(plans), frozen, config), groups, adapters)


def _require_used(groups: Iterable[tuple[frozenset[str], dict[str, float]]], frozen: frozenset[str]) -> None:
    """Make sure that every group has a trained parameter that no earlier group has."""
    taken = set(frozen)
    for number, (members, _) in enumerate(groups):
        if members <= taken:
            raise ConfigError(
                f"{GROUPS_KEY}[{number}] must have a parameter of its own, found all that it matches frozen "
                "or in earlier groups. Put it before them, or remove it."
            )
        taken |= members


def _constants(layers: Sequence[PipelineLayer]) -> frozenset[str]:
    """Parameters that the model itself never trains, such as tables of sinusoids."""
    named = ((layer, name, value) for layer in layers for name, value in layer.named_parameters())
    return frozenset(layer.hf_name(name) for layer, name, value in named if not value.requires_grad)


def _layer_states(
    weights: Sequence[NamedWeight], num_layers: int, frozen: frozenset[str], config: FinetuneConfig
) -> tuple[LayerTraining, ...]:
    total: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    for weight in weights:
        total[weight.layer] += weight.num_values
        trained[weight.layer] += 0 if weight.name in frozen else weight.num_values
    if not any(trained.values()):
        raise ConfigError(
            f"{_FREEZE_KEY}: something must be left to train; {config.freeze} freezes every parameter. "
            "Remove a pattern."
        )
    logger.info("%d of %d parameters are trained", sum(trained.values()), sum(total.values()))
    indices = range(num_layers)
    return tuple(layer_training([trained[i] for i in indices], [total[i] for i in indices]))


def apply(finetuning: Finetuning, layers: Mapping[int, PipelineLayer]) -> None:
    """Put adapters into the local layers (by index) and train exactly what is meant to be trained."""
    for index, layer in layers.items():
        if finetuning.adapters is not None:
            finetuning.adapters.inject(layer, index)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(layer.hf_name(name) not in finetuning.frozen)


def checkpoint_function(reentrant: bool) -> Callable[..., Any]:
    """Activation checkpointing that also works below the first trained parameter.

    Reentrant checkpointing runs without autograd and returns outputs that need a gradient only if an
    input does: the parameters of a layer whose input needs none would silently get no gradient. Such
    layers are checkpointed without re-entering.
    """
    if not reentrant:
        return checkpointing.non_reentrant_checkpoint

    def checkpoint(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        if any(tensor.requires_grad for tensor in inputs):
            return checkpointing.checkpoint(function, *inputs)
        return checkpointing.non_reentrant_checkpoint(function, *inputs)

    return checkpoint
