"""Low-rank adapters in pipeline layers, by ``peft``.

Hu et al. 2021 (arXiv 2106.09685). Adapters are injected into each pipeline layer on its own; their names are
those that ``peft`` gives them in the whole Hugging Face model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dflop_ds.config import LoraSettings
from dflop_ds.errors import ConfigError
from dflop_ds.models.layers import PipelineLayer

ADAPTER_NAME = "default"
TRAINED_FILE = "trained.safetensors"
"""Beside the adapters: the weights of ``also_train``, by Hugging Face name."""

_ADAPTER_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_HEAD_KIND = "head"


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Which linear layers have an adapter.

    Attributes
    ----------
    settings : LoraSettings
    weights : frozenset of str
        Hugging Face names of the weight matrices beside which an adapter is put.
    seed : int
        The adapters of layer ``i`` are initialised from ``seed + i``.
    """

    settings: LoraSettings
    weights: frozenset[str]
    seed: int

    @property
    def scale(self) -> float:
        """Factor of what the adapters add to a weight."""
        return self.settings.alpha / self.settings.rank

    def inject(self, layer: PipelineLayer, index: int) -> None:
        """Put adapters into one layer, in place; the global random state is untouched."""
        peft = require_peft()
        targets = [
            name for name, weight in linear_weights(layer).items() if layer.hf_name(weight) in self.weights
        ]
        if not targets:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + index)
            peft.inject_adapter_in_model(self._peft_config(targets), layer, adapter_name=ADAPTER_NAME)

    def save(self, directory: Path, trained: Mapping[str, torch.Tensor], base_model: str) -> None:
        """Write adapters as ``PeftModel.from_pretrained`` reads them, and other trained weights beside.

        Parameters
        ----------
        directory : Path
            Created if it is missing.
        trained : dict of str to Tensor
            All trained parameters of the whole model, by Hugging Face name.
        base_model : str
            Path of the frozen model.
        """
        directory.mkdir(parents=True, exist_ok=True)
        adapters = {name: value for name, value in trained.items() if is_adapter(name)}
        others = {name: value for name, value in trained.items() if not is_adapter(name)}
        names = {name: f"{_PEFT_PREFIX}{name}".replace(f".{ADAPTER_NAME}.", ".") for name in adapters}
        config = self._peft_config(sorted({name.rpartition(".")[0] for name in self.weights}))
        config.base_model_name_or_path, config.inference_mode = base_model, True
        config.save_pretrained(str(directory))
        save_file({names[name]: value for name, value in adapters.items()}, directory / _ADAPTER_FILE)
        if others:
            save_file(others, directory / TRAINED_FILE)

    def _peft_config(self, targets: list[str]) -> Any:
        settings = self.settings
        return require_peft().LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=targets,
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return f".lora_A.{ADAPTER_NAME}." in name or f".lora_B.{ADAPTER_NAME}." in name


def merged(
    weight: Callable[[str], torch.Tensor], names: Collection[str], scale: float | None
) -> Callable[[str], torch.Tensor]:
    """Weights with their adapters added, as ``peft`` merges them.

    Parameters
    ----------
    weight : callable
        Returns a parameter by its Hugging Face name, adapters included.
    names : collection of str
        All that it knows.
    scale : float or None
        Factor of the adapters, see :attr:`Adapters.scale`; None where there are none.

    Returns
    -------
    callable
        Returns a weight, in fp32 where it has an adapter.
    """

    def with_adapter(name: str) -> torch.Tensor:
        value, owner = weight(name), name.removesuffix(".weight")
        down, up = (f"{owner}.lora_{letter}.{ADAPTER_NAME}.weight" for letter in "AB")
        if scale is None or down not in names:
            return value
        first = weight(down).float()
        return value.float() + scale * (weight(up).float() @ first)

    return with_adapter


def linear_weights(layer: PipelineLayer) -> dict[str, str]:
    """By local name of each linear layer that may have an adapter, the local name of its weight."""
    if layer.kind == _HEAD_KIND:
        return {}
    return {name: f"{name}.weight" for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


def adapter_weights(layers: Iterable[PipelineLayer], selected: frozenset[str]) -> frozenset[str]:
    """Names of the selected weights that belong to linear layers.

    Raises
    ------
    ConfigError
        If there is none.
    """
    names = {layer.hf_name(weight) for layer in layers for weight in linear_weights(layer).values()}
    if not names & selected:
        raise ConfigError(
            "dflop.finetune.lora.match must match a linear layer other than the output head, found none; "
            'match modules such as "llm" or "encoder".'
        )
    return frozenset(names & selected)


def require_peft() -> Any:
    """The ``peft`` package.

    Raises
    ------
    ConfigError
        If it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"dflop.finetune.lora needs the package peft, found {error}; pip install 'dflop_ds[lora]'."
        ) from error
    return peft
