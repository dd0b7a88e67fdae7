"""Hugging Face weights into pipeline layers, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from dflop_ds.errors import ModelError
from dflop_ds.models.layers import PipelineLayer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors of a local Hugging Face directory, read one at a time.

    Parameters
    ----------
    directory : str or Path
        With ``model.safetensors`` or sharded files and their index.
    published_names : tuple of (str, str)
        See :class:`dflop_ds.families.Family`; ``transformers`` renames such weights when it loads them.

    Raises
    ------
    ModelError
        If there are no safetensors files.
    """

    def __init__(self, directory: str | Path, published_names: tuple[tuple[str, str], ...] = ()) -> None:
        self.directory = Path(directory)
        self._published_names = published_names
        self._files: dict[str, str] = {}
        if (self.directory / _INDEX).is_file():
            self._files = dict(json.loads((self.directory / _INDEX).read_text())["weight_map"])
        elif (self.directory / _SINGLE).is_file():
            with safe_open(str(self.directory / _SINGLE), framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise ModelError(
                f"{self.directory} must hold {_SINGLE} or {_INDEX}, found neither; "
                'save the model there, or set dflop.model.weights to "random".'
            )

    @staticmethod
    def exists(directory: str | Path) -> bool:
        """Whether a directory holds weights in this format."""
        return any((Path(directory) / name).is_file() for name in (_INDEX, _SINGLE))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its name in the ``transformers`` state dict.

        Raises
        ------
        ModelError
            If no file holds it under this or its published name.
        """
        for candidate in self._candidates(name):
            if candidate in self._files:
                with safe_open(str(self.directory / self._files[candidate]), framework="pt") as file:
                    return file.get_tensor(candidate)
        raise ModelError(
            f"{self.directory} must hold the weight {name}, found none of {list(self._candidates(name))}; "
            "use a complete checkpoint of this model."
        )

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        for current, published in self._published_names:
            if name.startswith(current):
                yield published + name[len(current) :]


def load_layer(layer: PipelineLayer, tensor: Callable[[str], torch.Tensor]) -> None:
    """Copy the weights of one layer.

    Parameters
    ----------
    layer : PipelineLayer
    tensor : callable
        Returns a tensor by its Hugging Face name.

    Raises
    ------
    ModelError
        If a shape differs.
    """
    with torch.no_grad():
        for local_name, parameter in layer.named_parameters():
            name = layer.hf_name(local_name)
            value = tensor(name)
            if value.shape != parameter.shape:
                raise ModelError(
                    f"the weight {name} must have shape {tuple(parameter.shape)}, found "
                    f"{tuple(value.shape)}; "
                    "config.json and weights must belong to the same model."
                )
            parameter.copy_(value)


def load_layers(layers: Iterable[PipelineLayer], source: Mapping[str, torch.Tensor] | Checkpoint) -> None:
    """Load every layer from a state dict or a checkpoint directory.

    Raises
    ------
    ModelError
        If a weight is missing or has another shape.
    """
    tensor = source.tensor if isinstance(source, Checkpoint) else partial(_from_mapping, source)
    for layer in layers:
        load_layer(layer, tensor)


def _from_mapping(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in state:
        raise ModelError(f"the state dict must hold the weight {name}, found none; use a complete one.")
    return state[name]
