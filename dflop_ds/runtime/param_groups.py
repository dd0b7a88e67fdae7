"""Optimizer groups by ``dflop.finetune.param_groups``, and learning-rate schedules that keep them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dflop_ds.errors import ConfigError
from dflop_ds.models.layers import PipelineLayer
from dflop_ds.runtime.finetune import GROUPS_KEY, Finetuning

_WARMUPS = ("WarmupLR", "WarmupDecayLR")
_RATIO_KEEPERS = ("WarmupCosineLR",)
_DEFAULT_MAX_LR = 0.001


def with_groups(
    ds_config: dict[str, Any], model: Any, optimizer: Any, model_parameters: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameters of the local stage in groups, and the configuration with a schedule for each group.

    Parameters
    ----------
    ds_config : dict
    model : DflopPipelineModule
        With a :class:`~dflop_ds.runtime.finetune.Finetuning` that has groups.
    optimizer, model_parameters : object
        As given to ``initialize``.

    Raises
    ------
    ConfigError
        If the caller groups parameters too, or the schedule cannot keep several learning rates.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{GROUPS_KEY} must be empty with an optimizer of your own, found both; give that optimizer "
            "its groups, or leave it to DeepSpeed's configuration."
        )
    parameters = list(model.parameters() if model_parameters is None else model_parameters)
    if any(isinstance(entry, dict) for entry in parameters):
        raise ConfigError(
            f"{GROUPS_KEY} must be empty with model_parameters in groups, found both; use one of them."
        )
    groups = group_parameters(model.local_layers(), model.finetuning, parameters)
    return groups, with_schedule(ds_config, groups)


def group_parameters(
    layers: Iterable[PipelineLayer], finetuning: Finetuning, parameters: Iterable[torch.nn.Parameter]
) -> list[dict[str, Any]]:
    """The given parameters as optimizer groups without empty ones; the default group comes first."""
    names = {id(p): layer.hf_name(name) for layer in layers for name, p in layer.named_parameters()}
    groups: list[dict[str, Any]] = [{"params": []}, *({"params": [], **own} for _, own in finetuning.groups)]
    for parameter in parameters:
        name = names.get(id(parameter))
        matching = (n for n, (members, _) in enumerate(finetuning.groups, start=1) if name in members)
        groups[next(matching, 0)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def with_schedule(ds_config: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The configuration with the warm-up of each group scaled to the group's learning rate.

    DeepSpeed's warm-up schedules set the same learning rate in every group, unless they are given a
    list with one value per group.

    Raises
    ------
    ConfigError
        If the schedule knows no lists, or there is no learning rate to compare with.
    """
    kind = (ds_config.get("scheduler") or {}).get("type")
    if kind is None or kind in _RATIO_KEEPERS or not any("lr" in group for group in groups):
        return ds_config
    if kind not in _WARMUPS:
        raise ConfigError(
            f"scheduler.type must be one of {[*_WARMUPS, *_RATIO_KEEPERS]} with a learning rate in "
            f"{GROUPS_KEY}, found {kind!r}; choose one of them."
        )
    base = (ds_config.get("optimizer") or {}).get("params", {}).get("lr")
    if not isinstance(base, (int, float)) or not base > 0:
        raise ConfigError(
            f"optimizer.params.lr must be a positive number with {GROUPS_KEY} and a scheduler, found "
            f"{base!r}; set it."
        )
    params = dict(ds_config["scheduler"].get("params", {}))
    for key, default in (("warmup_min_lr", 0.0), ("warmup_max_lr", _DEFAULT_MAX_LR)):
        value = params.get(key, default)
        params[key] = [value * group.get("lr", base) / base for group in groups]
    return {**ds_config, "scheduler": {**ds_config["scheduler"], "params": params}}
