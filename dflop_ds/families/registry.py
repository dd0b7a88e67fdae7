"""The registry of model families: one entry each."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from dflop_ds.errors import ConfigError
from dflop_ds.families.base import MediaRule
from dflop_ds.flops import ModelDims

ModelConfigDict = Mapping[str, Any]
ProcessorSettings = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """Everything that the rest of the package asks of a model family.

    Attributes
    ----------
    model_type : str
        ``model_type`` in the model's ``config.json``.
    rule : callable
        ``rule(config, settings) -> MediaRule`` from the content of ``config.json`` and of the processor's
        files, by their names without ``.json``, see
        :func:`dflop_ds.data.processor.read_settings`. Imports no torch.
    processor : str or callable
        ``processor(model_dir, rule) -> MediaProcessor``, see
        :class:`dflop_ds.data.processor.MediaProcessor`. A string ``"module:name"`` is imported
        where it is first needed, and so keeps torch out of the pure parts.
    layers : str or callable
        ``layers(model_config, *, attention, seed) -> list of LayerPlan``, see
        :mod:`dflop_ds.models.layers`; ``model_config`` is the ``transformers`` configuration.
    dims : callable
        ``dims(config) -> ModelDims``: what the cost model is told about the layers.
    published_names : tuple of (str, str)
        Prefixes of weight names: as ``transformers`` has them, and as published checkpoints do.
    """

    model_type: str
    rule: Callable[[ModelConfigDict, ProcessorSettings], MediaRule]
    processor: str | Callable[..., Any]
    layers: str | Callable[..., Any]
    dims: Callable[[ModelConfigDict], ModelDims] = ModelDims.from_hf_config
    published_names: tuple[tuple[str, str], ...] = ()

    def open_processor(self, *arguments: Any) -> Any:
        """Call ``processor``."""
        return _resolve(self.processor)(*arguments)

    def pipeline_layers(self, model_config: Any, **options: Any) -> Any:
        """Call ``layers``."""
        return _resolve(self.layers)(model_config, **options)


def image_settings(settings: ProcessorSettings) -> Mapping[str, Any]:
    """Settings of the image processor; as in ``transformers``, a part of the joint file goes first."""
    joint = settings.get("processor_config", {})
    return joint.get("image_processor") or settings.get("preprocessor_config", {})


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make a family known; an entry of the same model type is replaced."""
    _FAMILIES[family.model_type] = family


def import_families(module: str | None) -> None:
    """Import a user's module, which registers its family.

    Parameters
    ----------
    module : str or None
        ``dflop.model.family_module``.

    Raises
    ------
    ConfigError
        If there is no such module, or it fails.
    """
    if module is None:
        return
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"dflop.model.family_module must name a module that can be imported, found {module!r}: "
            f"{type(error).__name__}: {error}; install it or add its folder to PYTHONPATH."
        ) from error


def family_of(config: ModelConfigDict) -> Family:
    """Entry of a model's family.

    Parameters
    ----------
    config : mapping
        Content of the model's Hugging Face ``config.json``.

    Raises
    ------
    ConfigError
        If its ``model_type`` is not registered.
    """
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"model_type in config.json must be one of {sorted(_FAMILIES)}, found {model_type!r}; "
            "use a model of a supported family, or register yours (docs/families.md)."
        )
    return _FAMILIES[model_type]


def media_rule(config: ModelConfigDict, settings: ProcessorSettings | None = None) -> MediaRule:
    """Media rule of a model.

    Parameters
    ----------
    config : mapping
        Content of the model's ``config.json``.
    settings : mapping, optional
        Content of the files of its processor, as :class:`Family` wants them.

    Raises
    ------
    ConfigError
        If the model type is unknown or its configuration is not supported.
    """
    return family_of(config).rule(config, settings or {})


def model_dims(config: ModelConfigDict) -> ModelDims:
    """Dimensions of a model for the cost model; of an unknown model type as LLaVA has them.

    Raises
    ------
    CostModelError
        If a dimension is missing.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    return ModelDims.from_hf_config(config) if family is None else family.dims(config)


def _resolve(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(reference):
        return reference
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
