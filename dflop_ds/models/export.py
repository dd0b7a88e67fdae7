"""Trained weights as a Hugging Face directory, written shard by shard and stage by stage."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForMultimodalLM

from dflop_ds.errors import ModelError
from dflop_ds.models.layers import seeded_init
from dflop_ds.models.weights import HEAD, Checkpoint, untie

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
_COPIED = frozenset({".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md"})
_TEMPLATES = "additional_chat_templates"
_DTYPE_KEYS = ("dtype", "torch_dtype")

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of weights.

    Attributes
    ----------
    stage : int
        Who writes it.
    file : str
    names : tuple of str
        In the ``transformers`` state dict.
    """

    stage: int
    file: str
    names: tuple[str, ...]


def cut_into_shards(sizes_bytes: Sequence[Mapping[str, int]], max_bytes: int) -> list[Shard]:
    """Divide weights among files such that no file has weights of two stages.

    Parameters
    ----------
    sizes_bytes : sequence of mapping
        By stage, the size of each weight.
    max_bytes : int
        Of a file; one that holds a single weight may be larger.
    """
    cuts: list[tuple[int, list[str]]] = []
    for stage, sizes in enumerate(sizes_bytes):
        filled = math.inf
        for name, size in sizes.items():
            if filled + size > max_bytes:
                cuts.append((stage, []))
                filled = 0
            cuts[-1][1].append(name)
            filled += size
    total = len(cuts)
    return [
        Shard(stage, f"model-{number:05d}-of-{total:05d}.safetensors", tuple(names))
        for number, (stage, names) in enumerate(cuts, start=1)
    ]


def whole_model_shapes(model_config: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the ``transformers`` model, tied ones once; empty if it has no such model."""
    try:
        with torch.device("meta"):
            model = AutoModelForMultimodalLM.from_config(model_config)
    except ValueError:  # a family that transformers does not know
        return {}
    saved = model.state_dict()
    buffers = {name: tuple(value.shape) for name, value in model.named_buffers() if name in saved}
    return {name: tuple(value.shape) for name, value in model.named_parameters()} | buffers


class HuggingFaceWriter:
    """Writes one export; every rank builds the same one, and each writes its own files.

    Weights that the model has and no pipeline layer owns (unused encoder blocks) are taken from the
    directory that training began with, or are random if that holds no weights.

    Parameters
    ----------
    directory : Path
        Receives the export.
    source : Path
        Directory that training began with: configuration, tokenizer, processor, names of the weights.
    model_config : PretrainedConfig
    stages : sequence of mapping of str to shape
        Weights of each stage by their names in the ``transformers`` state dict. One that occurs in several
        stages is written by the first.
    dtype : torch.dtype
        Of the exported weights.
    published_names : tuple of (str, str)
        See :class:`dflop_ds.families.Family`.
    max_shard_bytes : int

    Raises
    ------
    ModelError
        If the layers hold weights that the model does not have, such as those of adapters.
    """

    def __init__(
        self,
        directory: Path,
        source: Path,
        model_config: Any,
        stages: Sequence[Shapes],
        dtype: torch.dtype,
        *,
        published_names: tuple[tuple[str, str], ...] = (),
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.directory, self.source, self.dtype = directory, source, dtype
        self._known = Checkpoint(source, published_names) if Checkpoint.exists(source) else None
        owned: dict[str, tuple[int, ...]] = {}
        by_stage: list[dict[str, tuple[int, ...]]] = []
        for shapes in stages:
            by_stage.append({name: shape for name, shape in shapes.items() if name not in owned})
            owned |= by_stage[-1]
        self._unties = getattr(model_config, "tie_word_embeddings", False) and HEAD in owned
        if self._unties:
            model_config = copy.deepcopy(model_config)
            untie(model_config)
        whole = whole_model_shapes(model_config)
        _check_names(owned, whole)
        self._carried = {name: shape for name, shape in whole.items() if name not in owned}
        by_stage[0] |= self._carried
        self._shapes = owned | self._carried
        sizes_bytes = [
            {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()} for shapes in by_stage
        ]
        self.shards = cut_into_shards(sizes_bytes, max_shard_bytes)

    def write_stage(self, stage: int, weight: Callable[[str], torch.Tensor]) -> None:
        """Write the files of one stage; no more than one file's weights are held at a time.

        Parameters
        ----------
        stage : int
        weight : callable
            Returns a weight of the stage by its name in the ``transformers`` state dict.
        """
        for shard in self.shards:
            if shard.stage == stage:
                tensors = {
                    self._written_name(name): self._tensor(name, weight).to(self.dtype).cpu().contiguous()
                    for name in shard.names
                }
                save_file(tensors, str(self.directory / shard.file), metadata={"format": "pt"})

    def order(self, stage: int) -> list[str]:
        """Weights of the layers of a stage, in the order in which :meth:`write_stage` asks for them."""
        names = [name for shard in self.shards if shard.stage == stage for name in shard.names]
        return [name for name in names if name not in self._carried]

    def write_rest(self) -> None:
        """Write the index and the configuration, and copy tokenizer and processor (one rank)."""
        weight_map = {self._written_name(name): shard.file for shard in self.shards for name in shard.names}
        numel = sum(math.prod(shape) for shape in self._shapes.values())
        metadata = {"total_parameters": numel, "total_size": numel * self.dtype.itemsize}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (self.directory / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for path in sorted(self.source.iterdir()):
            if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self.directory / path.name)
        if (self.source / _TEMPLATES).is_dir():
            shutil.copytree(self.source / _TEMPLATES, self.directory / _TEMPLATES)
        config = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
        _set_dtype(config, str(self.dtype).removeprefix("torch."))
        config.setdefault("dtype", str(self.dtype).removeprefix("torch."))
        if self._unties:
            for part in (config, config.get("text_config") or {}):
                part["tie_word_embeddings"] = False
        (self.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _written_name(self, name: str) -> str:
        known = None if self._known is None else self._known.stored_name(name)
        return known or name

    def _tensor(self, name: str, weight: Callable[[str], torch.Tensor]) -> torch.Tensor:
        if name not in self._carried:
            return weight(name)
        if self._known is not None:
            for _, value in self._known.read([name]):
                return value
        module, value = torch.nn.Module(), torch.nn.Parameter(torch.empty(self._shapes[name]))
        module.register_parameter(name.rpartition(".")[2], value)
        seeded_init(module, seed=0, std=0.02)
        return value.detach()


def _check_names(owned: Shapes, whole: Shapes) -> None:
    unknown = sorted(name for name in owned if name not in whole) if whole else []
    if unknown:
        raise ModelError(
            "every trained weight must be one of the model, found others: "
            + ", ".join(unknown)
            + ". Export adapters in their own format, or merge them first."
        )


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Let a configuration and its parts name the precision of the weights."""
    for key, value in config.items():
        if key in _DTYPE_KEYS and isinstance(value, str):
            config[key] = dtype
        elif isinstance(value, dict):
            _set_dtype(value, dtype)
