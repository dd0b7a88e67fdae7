"""What every pipeline layer of every model family has in common, and how layers are planned.

A layer takes and returns ``(hidden, layout)``: one float tensor that carries the gradient and the
``int64`` vector of :class:`~dflop_ds.data.layout.PackedLayout`. The last layer returns logits only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

Carry = tuple[torch.Tensor, torch.Tensor]


class PipelineLayer(nn.Module):
    """Base of the pipeline layers.

    Attributes
    ----------
    kind : str
        Layer kind of the cost model, one of ``dflop_ds.cost.features.LAYER_KINDS``.
    init_constants : mapping of str to float
        Initial values of vectors, by the last part of their names; others are 0 (biases) or 1.
    init_normal : tuple of str
        Vectors that are drawn at random as matrices are.
    """

    kind: str = ""
    init_constants: Mapping[str, float] = {}
    init_normal: tuple[str, ...] = ()

    def hf_prefixes(self) -> dict[str, str]:
        """Map from a local parameter prefix to its prefix in the Hugging Face state dict."""
        raise NotImplementedError

    def hf_name(self, local_name: str) -> str:
        """Hugging Face name of a local parameter; a weight beside an adapter keeps the name that it had."""
        local_name = local_name.replace(".base_layer.", ".")
        for local, remote in self.hf_prefixes().items():
            if local_name == local or local_name.startswith(local + "."):
                return remote + local_name[len(local) :]
        raise KeyError(local_name)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How to build one pipeline layer, without building it.

    Attributes
    ----------
    kind : str
        Layer kind of the cost model.
    build : callable
        Returns the module, freshly initialised from its own seed: weights do not depend on
        which stage or rank builds the layer.
    tied_key : str, optional
        Layers with the same key share one module (tied embeddings).
    forward_fn : callable, optional
        ``forward_fn(module, carry)`` where the shared module plays another role.
    tied_weights : tuple of str
        Names of the weights that the layers share.
    """

    kind: str
    build: Callable[[], PipelineLayer]
    tied_key: str | None = None
    forward_fn: Callable[[Any, Any], Any] | None = None
    tied_weights: tuple[str, ...] = ()


class PlanList(list[LayerPlan]):
    """Plans of a model under construction; layer ``i`` is initialised from ``seed + i``.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def add(self, layer: type[PipelineLayer], std: float, *args: Any, **tie: Any) -> LayerPlan:
        """Append the plan of one layer.

        Parameters
        ----------
        layer : type
            Built as ``layer(*args)`` when the plan is carried out.
        std : float
            Standard deviation of its initial weight matrices.
        **tie
            Tying fields of :class:`LayerPlan`.
        """
        build = partial(_build, layer, self._seed + len(self), std, *args)
        plan = LayerPlan(layer.kind, build, **tie)
        self.append(plan)
        return plan


def _build(layer: type[PipelineLayer], seed: int, std: float, *args: Any) -> PipelineLayer:
    module = layer(*args)
    seeded_init(module, seed, std)
    return module


def seeded_init(module: nn.Module, seed: int, std: float) -> None:
    """Initialise in place: normal matrices, zero biases, unit norms; the global RNG is untouched.

    A :class:`PipelineLayer` may state other values.

    Parameters
    ----------
    module : Module
    seed : int
    std : float
        Standard deviation of weight matrices, ``initializer_range`` of the configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    constants = getattr(module, "init_constants", {})
    normal = getattr(module, "init_normal", ())
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        last = name.rpartition(".")[2]
        with torch.no_grad():
            if last in constants:
                parameter.fill_(constants[last])
            elif parameter.dim() >= 2 or last in normal:
                _draw(parameter, std, generator)
            elif last == "bias":
                parameter.zero_()
            else:
                parameter.fill_(1.0)


def _draw(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with the same numbers on every device."""
    if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
        parameter.normal_(0.0, std, generator=generator)
    else:
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
