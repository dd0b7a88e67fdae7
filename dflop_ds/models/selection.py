"""Parameters chosen by pattern: modules by their name in the pipeline, or Hugging Face names.

A layer has a module path, made of its kind and its number among the layers of this kind:
``encoder.embed``, ``encoder.layers.0``, ..., ``projector``, ``llm.embed``, ``llm.layers.0``, ...,
``llm.norm``, ``llm.head``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from dflop_ds.config.explain import nearest
from dflop_ds.errors import ConfigError
from dflop_ds.models.layers import LayerPlan, PipelineLayer

_PATHS = {
    "projector": "projector",
    "token_embed": "llm.embed",
    "decoder_block": "llm.layers",
    "norm": "llm.norm",
    "head": "llm.head",
}


@dataclasses.dataclass(frozen=True, slots=True)
class NamedWeight:
    """One parameter of one pipeline layer.

    Attributes
    ----------
    layer : int
        Index of the layer in the pipeline.
    module : str
        Module path of the layer.
    name : str
        Hugging Face name. Tied layers have the same one.
    num_values : int
    """

    layer: int
    module: str
    name: str
    num_values: int


def build_without_memory(plans: Sequence[LayerPlan]) -> list[PipelineLayer]:
    """Every layer of the whole model, in pipeline order, with shapes but no values."""
    with torch.device("meta"):
        return [plan.build() for plan in plans]


def named_weights(plans: Sequence[LayerPlan], layers: Sequence[PipelineLayer]) -> list[NamedWeight]:
    """Every parameter of the whole model, in pipeline order.

    Parameters
    ----------
    plans : sequence of LayerPlan
    layers : sequence of PipelineLayer
        Built from them, see :func:`build_without_memory`.
    """
    return [
        NamedWeight(index, module, layer.hf_name(name), parameter.numel())
        for index, (layer, module) in enumerate(zip(layers, module_paths(plans), strict=True))
        for name, parameter in layer.named_parameters()
    ]


def module_paths(plans: Sequence[LayerPlan]) -> list[str]:
    """Module path of each layer."""
    counts: collections.Counter[str] = collections.Counter()
    paths = []
    for plan in plans:
        is_block = plan.kind.endswith("_block")
        base = _PATHS.get(plan.kind, "encoder.layers" if is_block else "encoder.embed")
        paths.append(f"{base}.{counts[base]}" if is_block else base)
        counts[base] += 1
    return paths


def select(patterns: Iterable[str], weights: Sequence[NamedWeight], where: str) -> frozenset[str]:
    """Hugging Face names of the parameters that any pattern matches.

    A pattern is a module path, the beginning of one up to a dot, or a glob pattern over either
    kind of name (``*``, ``?``, ``[01]``).

    Parameters
    ----------
    patterns : iterable of str
    weights : sequence of NamedWeight
    where : str
        Key of the configuration, named in errors.

    Raises
    ------
    ConfigError
        Naming every pattern that matches nothing, and the modules that there are.
    """
    chosen: set[str] = set()
    unknown = []
    for pattern in patterns:
        found = {weight.name for weight in weights if _matches(pattern, weight)}
        chosen |= found
        if not found:
            unknown.append(pattern)
    if unknown:
        raise ConfigError("\n".join(_nothing_found(pattern, weights, where) for pattern in unknown))
    return frozenset(chosen)


def _matches(pattern: str, weight: NamedWeight) -> bool:
    return any(
        fnmatchcase(name, form) for name in (weight.module, weight.name) for form in (pattern, f"{pattern}.*")
    )


def _nothing_found(pattern: str, weights: Sequence[NamedWeight], where: str) -> str:
    modules = list(dict.fromkeys(weight.module for weight in weights))
    parents = list(dict.fromkeys(part for module in modules for part in _parents(module)))
    likely = nearest(pattern, [*parents, *modules, *(weight.name for weight in weights)])
    hint = f"Did you mean {likely!r}? " if likely is not None else ""
    return (
        f"{where}: every pattern must match a parameter; {pattern!r} matches none. {hint}There are the "
        f"modules {', '.join(parents)} and parameters such as {weights[0].name} and {weights[-1].name}."
    )


def _parents(module: str) -> list[str]:
    """A module path and what it is part of, without layer numbers."""
    parts = [part for part in module.split(".") if not part.isdigit()]
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
