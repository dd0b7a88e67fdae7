"""Hugging Face weights into pipeline layers, layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from dflop_ds.errors import ModelError
from dflop_ds.models.layers import PipelineLayer

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""Of safetensors; all others are of quantised weights."""

EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
"""Weights that may be tied, in the ``transformers`` state dict."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorHeader:
    """What the header of a file says of a tensor.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        As safetensors names it.
    """

    shape: tuple[int, ...]
    dtype: str


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
        If there are no safetensors files, or the index cannot be read or names files that are not there.
    """

    def __init__(self, directory: str | Path, published_names: tuple[tuple[str, str], ...] = ()) -> None:
        self.directory = Path(directory)
        self._published_names = published_names
        self._files: dict[str, str] = {}
        if (self.directory / _INDEX).is_file():
            self._files = _read_index(self.directory / _INDEX)
        elif (self.directory / _SINGLE).is_file():
            with self._open(_SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            found = ", ".join(self.other_weights(self.directory)) or "neither"
            raise ModelError(
                f"{self.directory} must hold {_SINGLE} or {_INDEX}, found {found}; save the model there with "
                'save_pretrained of transformers, or set dflop.model.weights to "random".'
            )

    @staticmethod
    def exists(directory: str | Path) -> bool:
        """Whether a directory holds weights in this format."""
        return any((Path(directory) / name).is_file() for name in (_INDEX, _SINGLE))

    @staticmethod
    def other_weights(directory: str | Path) -> list[str]:
        """Files of weights that are not in this format."""
        if Checkpoint.exists(directory):
            return []
        return sorted({path.name for form in _OTHER_WEIGHTS for path in Path(directory).glob(form)})

    def stored_name(self, name: str) -> str | None:
        """Under which name the files hold a weight of the ``transformers`` state dict, if they do."""
        return next((candidate for candidate in self._candidates(name) if candidate in self._files), None)

    def headers(self, names: Iterable[str]) -> dict[str, TensorHeader]:
        """Shapes and types of the weights that there are, from the headers of the files."""
        headers = {}
        for file, stored in self._by_file(names).items():
            with self._open(file) as opened:
                for name, stored_name in stored.items():
                    tensor = opened.get_slice(stored_name)
                    headers[name] = TensorHeader(tuple(tensor.get_shape()), tensor.get_dtype())
        return headers

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights one after the other; every file that holds some of them is opened once.

        Parameters
        ----------
        names : iterable of str
            Names in the ``transformers`` state dict; one that is not there is left out.
        """
        for file, stored in self._by_file(names).items():
            with self._open(file) as opened:
                for name, stored_name in stored.items():
                    yield name, opened.get_tensor(stored_name)

    def unexpected(self, names: Iterable[str]) -> list[str]:
        """What the files hold beyond these weights."""
        expected = {self.stored_name(name) for name in names}
        return sorted(name for name in self._files if name not in expected)

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        """One file; what is wrong with it becomes an error that names it."""
        try:
            with safe_open(str(self.directory / file), framework="pt") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self.directory / file} must be a whole safetensors file with the weights that its index "
                f"names, found {error}; copy or download it again."
            ) from error

    def _by_file(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        by_file: dict[str, dict[str, str]] = {}
        for name in names:
            stored = self.stored_name(name)
            if stored is not None:
                by_file.setdefault(self._files[stored], {})[name] = stored
        return by_file

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        for current, published in self._published_names:
            if name.startswith(current):
                yield published + name[len(current) :]


def _read_index(path: Path) -> dict[str, str]:
    """File of each weight.

    Raises
    ------
    ModelError
        If the index is damaged, or files are not there.
    """
    try:
        files = {str(name): str(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path} must map weights to files, found {type(error).__name__}: {error}; "
            "copy or download it again."
        ) from error
    absent = sorted(file for file in set(files.values()) if not (path.parent / file).is_file())
    if absent:
        raise ModelError(
            f"{path.parent} must hold every file of its index, found no {', '.join(absent)}; "
            "copy or download what is missing."
        )
    return files


def load_layers(layers: Iterable[PipelineLayer], source: Mapping[str, torch.Tensor] | Checkpoint) -> None:
    """Fill the weights of every layer, one layer and one tensor at a time.

    Weights of a directory in the precision of the layer are not copied: they stay in the file, of which the
    operating system loads what is used, until they are moved to a device, converted or trained.

    Parameters
    ----------
    layers : iterable of PipelineLayer
    source : mapping of str to Tensor, or Checkpoint
        State dict with the names of ``transformers``, or a directory.

    Raises
    ------
    ModelError
        If weights are missing or have another shape, naming all of them; nothing is copied then.
    """
    layers = list(layers)
    check_weights(layers, source)
    in_files = isinstance(source, Checkpoint)
    for layer in layers:
        parameters = named_weights(layer)
        read = source.read(parameters) if isinstance(source, Checkpoint) else _chosen(source, parameters)
        with torch.no_grad():
            for name, value in read:
                parameter = parameters[name]
                if in_files and (value.dtype, value.device) == (parameter.dtype, parameter.device):
                    parameter.data = value
                else:
                    parameter.copy_(value)


def check_weights(
    layers: Iterable[PipelineLayer],
    source: Mapping[str, torch.Tensor] | Checkpoint,
    also_known: Iterable[str] = (),
) -> None:
    """Make sure that a source has every weight in its shape, and name what nobody asks for.

    Parameters
    ----------
    layers : iterable of PipelineLayer
        May be on the meta device.
    source : mapping of str to Tensor, or Checkpoint
        Only the headers of its files are read.
    also_known : iterable of str
        Weights of the model beyond those of the layers. Without any, unexpected weights are not looked for.

    Raises
    ------
    ModelError
        Naming all weights that are missing, of another shape or quantised, and the unexpected ones beside
        them.
    """
    wanted = {name: tuple(p.shape) for layer in layers for name, p in named_weights(layer).items()}
    if isinstance(source, Checkpoint):
        headers, where = source.headers(wanted), str(source.directory)
        found = {name: header.shape for name, header in headers.items()}
        quantised = [
            f"{name} ({header.dtype} instead of a floating-point type of 16 bits or more)"
            for name, header in headers.items()
            if header.dtype not in _FLOAT_TYPES
        ]
    else:
        found = {name: tuple(source[name].shape) for name in wanted if name in source}
        where, quantised = "the state dict", []
    missing = [f"{name} (missing)" for name in wanted if name not in found]
    other = [
        f"{name} (shape {found[name]} instead of {shape})"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    also_known = set(also_known)
    unexpected = (
        source.unexpected({*wanted, *also_known}) if also_known and isinstance(source, Checkpoint) else []
    )
    if missing or other or quantised:
        extra = [f"{name} (unexpected)" for name in unexpected]
        raise ModelError(
            f"{where} must hold every weight of the model in its shape, found: "
            + "; ".join([*missing, *other, *quantised, *extra])
            + ". config.json and weights must belong to the same model; use a complete checkpoint of it."
        )
    if unexpected:
        logger.warning("%s holds weights that the model has no place for: %s", where, ", ".join(unexpected))


def has_own_head(source: Checkpoint) -> bool:
    """Whether the files hold a head that is not equal to the embeddings, so that they cannot be tied.

    Like ``transformers``, which leaves such weights untied whatever the configuration says: those of
    releases that wrote no ``tie_word_embeddings`` at all are taken as tied by default.
    """
    names = [EMBEDDING, HEAD]
    if any(source.stored_name(name) is None for name in names):
        return False
    weights = dict(source.read(names))
    return not torch.equal(weights[EMBEDDING], weights[HEAD])


def untie(model_config: Any) -> None:
    """Let a ``transformers`` configuration say that input and output embeddings are not tied."""
    for part in (model_config, model_config.get_text_config()):
        part.tie_word_embeddings = False


def named_weights(layer: PipelineLayer) -> dict[str, torch.nn.Parameter]:
    """Parameters of a layer by their names in the ``transformers`` state dict."""
    return {layer.hf_name(local): parameter for local, parameter in layer.named_parameters()}


def uninitialised() -> TorchFunctionMode:
    """Context in which layers are built without random numbers, as weights will be loaded into them."""
    return _WithoutRandomNumbers()


_RANDOM_INIT = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
)


class _WithoutRandomNumbers(TorchFunctionMode):
    _skipped = frozenset(
        {
            torch.Tensor.normal_,
            torch.Tensor.uniform_,
            *(getattr(torch.nn.init, name) for name in _RANDOM_INIT),
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._skipped:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _chosen(state: Mapping[str, torch.Tensor], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, state[name]) for name in names)
