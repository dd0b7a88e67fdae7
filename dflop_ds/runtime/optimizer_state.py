"""Optimizer state that follows its parameters to another number of stages or replicas."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from dflop_ds.errors import ConfigError
from dflop_ds.runtime import compat
from dflop_ds.runtime.saved import SavedCheckpoint, SavedParameter

logger = logging.getLogger(__name__)


def describe(engine: Any) -> dict[str, Any]:
    """Where the state of each parameter of this rank is in the files of a checkpoint.

    Returns
    -------
    dict
        The "file" and, by parameter name, either parameter group and number of the parameter, or parameter
        group, start in the flat partition, start in the parameter and number of elements; and the "kind" of
        optimizer.
    """
    if engine.optimizer is None:
        return {"file": "", "parameters": {}, "kind": None}
    parameters: dict[str, list[int]] = {}
    if compat.keeps_partitions(engine.optimizer):
        for name, parameter in engine.module.named_parameters():
            piece = compat.partition_piece(parameter)
            if piece is not None:
                parameters[name] = list(piece)
    elif engine.grid.get_data_parallel_rank() == 0:
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        groups = enumerate(engine.optimizer.param_groups)
        trained = [(group, parameter) for group, content in groups for parameter in content["params"]]
        parameters = {names[id(p)]: [group, number] for number, (group, p) in enumerate(trained)}
    return {"file": compat.optimizer_file(engine), "parameters": parameters, "kind": _kind(engine)}


def require_same_kind(engine: Any, saved: SavedCheckpoint) -> None:
    """Make sure that the state in a checkpoint is of the optimizer of this run.

    Raises
    ------
    ConfigError
    """
    kinds = {rank["optimizer"].get("kind") for rank in saved.ranks} - {None}
    if engine.optimizer is not None and kinds and kinds != {_kind(engine)}:
        raise ConfigError(
            f"the optimizer must be that of the checkpoint, found {_kind(engine)} instead of "
            f"{', '.join(sorted(kinds))}; change it back, or take the weights alone: by load_checkpoint(..., "
            "load_module_only=True), or from what `dflop-ds export` makes of the checkpoint."
        )


def _kind(engine: Any) -> str:
    wrapped = compat.keeps_partitions(engine.optimizer)
    return type(engine.optimizer.optimizer if wrapped else engine.optimizer).__name__


def restore(engine: Any, saved: SavedCheckpoint, *, keep_rates: bool = False) -> None:
    """Give every parameter of this rank the state that it had; new ones begin without any.

    Parameters
    ----------
    engine : DflopPipelineEngine
    saved : SavedCheckpoint
    keep_rates : bool
        Leave the learning rates as they are.
    """
    if engine.optimizer is None:
        return
    own_options = frozenset({"lr"}) if keep_rates else frozenset()
    if compat.keeps_partitions(engine.optimizer):
        unknown = _restore_partitions(engine, saved, own_options)
    else:
        unknown = _restore_whole(engine, saved, own_options)
    if unknown:
        logger.warning("the checkpoint has no optimizer state of %s: it begins anew", ", ".join(unknown))


def _restore_whole(engine: Any, saved: SavedCheckpoint, own_options: frozenset[str]) -> list[str]:
    optimizer, unknown = engine.optimizer, []
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for group in optimizer.param_groups:
        options: dict[str, Any] | None = None
        for parameter in group["params"]:
            found = saved.parameter(names[id(parameter)])
            if found is None:
                unknown.append(names[id(parameter)])
                continue
            if found.master is not None:
                parameter.data.copy_(found.master.view_as(parameter))
            optimizer.state[parameter] = {
                key: value.to(parameter.device, copy=True).view_as(parameter)
                if _per_element(value, parameter)
                else copy.deepcopy(value)
                for key, value in found.state.items()
            }
            options = found.options if options is None else options
        _take_options(engine, group, options or {}, own_options)
    return unknown


def _restore_partitions(engine: Any, saved: SavedCheckpoint, own_options: frozenset[str]) -> list[str]:
    base = engine.optimizer.optimizer
    flats, unknown = compat.flat_partitions(engine.optimizer), []
    known_options: dict[int, dict[str, Any]] = {}
    for name, parameter in engine.module.named_parameters():
        piece = compat.partition_piece(parameter)
        if piece is None:
            continue
        group, start, own_start, length = piece
        found = saved.parameter(name)
        if found is None:
            unknown.append(name)
            continue
        own, place = slice(own_start, own_start + length), slice(start, start + length)
        master = saved.weight_of(name).flatten() if found.master is None else found.master
        flats[group].data[place] = master[own].to(flats[group])
        _fill_state(base.state[flats[group]], flats[group], found, parameter, own, place)
        known_options.setdefault(group, found.options)
    for group, options in known_options.items():
        _take_options(engine, base.param_groups[group], options, own_options)
    return unknown


def _take_options(
    engine: Any, group: dict[str, Any], options: dict[str, Any], own_options: frozenset[str]
) -> None:
    """Go on with the options of the checkpoint, as optimizers of torch do; a schedule sets the rate anew."""
    watched = ("weight_decay",) if engine.lr_scheduler is not None else ("lr", "weight_decay")
    changed = [
        f"{key} {options[key]!r} instead of {group[key]!r}"
        for key in watched
        if key in options and key in group and options[key] != group[key]
    ]
    if changed:
        logger.warning(
            "the optimizer goes on with the checkpoint's %s; to change it, load the weights alone",
            ", ".join(changed),
        )
    group.update(copy.deepcopy({key: value for key, value in options.items() if key not in own_options}))


def _fill_state(
    state: dict[str, Any],
    flat: torch.Tensor,
    found: SavedParameter,
    parameter: torch.Tensor,
    own: slice,
    place: slice,
) -> None:
    for key, value in found.state.items():
        if not _per_element(value, parameter):
            state[key] = copy.deepcopy(value)
            continue
        if not isinstance(state.get(key), torch.Tensor):
            state[key] = torch.zeros_like(flat, dtype=value.dtype)
        state[key][place] = value[own].to(flat.device)


def _per_element(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == parameter.numel()
