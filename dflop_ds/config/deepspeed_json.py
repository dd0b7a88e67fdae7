"""DeepSpeed's own part of the configuration: reading it, its batch sizes, its limits here."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dflop_ds.errors import ConfigError

#: DeepSpeed's keys, of which any two give the third.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_REDUCE_BUCKET_VALUES = 500_000_000
"""DeepSpeed's default."""

_ZERO_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muon")
"""Names by which a configuration asks for DeepSpeed's ``ZERO_SUPPORTED_OPTIMIZERS``."""

_REFUSED = (
    ("fp16", "enabled", 'Use "bf16": {"enabled": true}, which needs no loss scaling, or fp32.'),
    ("amp", "enabled", 'Use "bf16": {"enabled": true} or fp32.'),
    ("data_efficiency", "enabled", "dflop_ds draws the samples itself; remove the block."),
    (
        "curriculum_learning",
        "enabled",
        "It changes sequence lengths after they are planned; remove the block.",
    ),
)


def load_ds_config(path_or_dict: str | os.PathLike[str] | dict[str, Any]) -> dict[str, Any]:
    """Read a DeepSpeed configuration.

    Parameters
    ----------
    path_or_dict : path or dict
        A JSON file, or a configuration that is already read. As in DeepSpeed, a file may be
        Hjson, that is JSON with comments.

    Returns
    -------
    dict
        A copy that the caller may change.

    Raises
    ------
    ConfigError
        If the file is missing, not valid JSON, holds a key twice or is not an object.
    """
    if isinstance(path_or_dict, dict):
        return copy.deepcopy(path_or_dict)
    if not isinstance(path_or_dict, (str, os.PathLike)):
        raise ConfigError(
            f"a DeepSpeed configuration must be a path or a dict, found "
            f"{type(path_or_dict).__name__}. Pass one."
        )
    path = Path(path_or_dict)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a DeepSpeed configuration must be a readable UTF-8 file, found {path}: {error}. Check the path."
        ) from error
    loaded = _parse_json(text, path)
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path} must hold a JSON object, found {type(loaded).__name__}. Wrap the settings in braces."
        )
    return loaded


def _parse_json(text: str, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"{path}: each key must occur once, found twice: {twice}. Remove one of each.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ConfigError(
            f"{path} must be nested sensibly, found too many levels. Correct the file."
        ) from error
    except json.JSONDecodeError as error:
        try:
            import hjson  # a dependency of DeepSpeed, which reads its configuration with it

            return hjson.loads(text, object_pairs_hook=unique)
        except (ImportError, ValueError):
            raise ConfigError(
                f"{path} must be valid JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
                "Correct the file there."
            ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes of one optimizer step, by DeepSpeed's rule.

    Attributes
    ----------
    train_batch_size : int
        Samples of one optimizer step over all replicas.
    micro_batch_size : int
        Samples of one microbatch on one replica; the mean number where they vary.
    num_microbatches : int
        Microbatches per step and replica (gradient accumulation steps).
    """

    train_batch_size: int
    micro_batch_size: int
    num_microbatches: int

    @classmethod
    def from_ds_config(cls, ds_config: dict[str, Any], data_parallel_size: int) -> BatchSizes:
        """Resolve DeepSpeed's three keys, of which one or two may be absent.

        Parameters
        ----------
        ds_config : dict
            A whole DeepSpeed configuration.
        data_parallel_size : int
            Number of replicas of the pipeline.

        Raises
        ------
        ConfigError
            If the keys are absent, not positive integers or contradict each other.
        """
        if data_parallel_size < 1:
            raise ConfigError(
                f"the number of replicas must be at least 1, found {data_parallel_size}. "
                "Use a number of ranks that is a multiple of the number of stages."
            )
        train, micro, steps = (_batch_value(ds_config, key) for key in BATCH_KEYS)
        if train is None and micro is None:
            raise ConfigError(
                f"{BATCH_KEYS[0]} or {BATCH_KEYS[1]} must be given, found neither. "
                f"Add two of {', '.join(BATCH_KEYS)}."
            )
        if steps is None:
            steps = 1 if train is None or micro is None else train // micro // data_parallel_size
        if micro is None:
            micro = (train or 0) // data_parallel_size // steps
        if train is None:
            train = micro * steps * data_parallel_size
        if min(micro, steps) < 1 or train != micro * steps * data_parallel_size:
            given = ", ".join(f"{key} = {ds_config.get(key, 'absent')}" for key in BATCH_KEYS)
            raise ConfigError(
                "train_batch_size must equal train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
                f"replicas; found {given}, and {data_parallel_size} replicas, which resolve to "
                f"{train} != {micro} x {steps} x {data_parallel_size}. "
                "Change one of them, or give only two of the three keys."
            )
        return cls(train, micro, steps)


def _batch_value(ds_config: dict[str, Any], key: str) -> int | None:
    value = ds_config.get(key)
    if value is None:
        return None
    if value == "auto":
        raise ConfigError(
            f'{key} must be a number, found "auto", which only the Trainer resolves. Set a number.'
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be an integer of at least 1, found {value!r}. Change it.")
    return value


def validate_for_pipeline(ds_config: dict[str, Any]) -> None:
    """Refuse DeepSpeed settings that cannot work with the pipeline engine.

    Parameters
    ----------
    ds_config : dict
        A whole DeepSpeed configuration.

    Raises
    ------
    ConfigError
        One line for each refused setting.
    """
    problems = []
    if "bfloat16" in ds_config:
        problems.append('bfloat16: must be called "bf16", its present name; found the old key. Rename it.')
    bf16 = _block(ds_config, "bf16").get("enabled", False)
    if not isinstance(bf16, bool):
        problems.append(f"bf16.enabled: must be true or false; found {bf16!r}. Correct it.")
    clipping = ds_config.get("gradient_clipping", 1.0)
    if isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or not clipping >= 0:
        problems.append(f"gradient_clipping: must be a number of at least 0; found {clipping!r}. Correct it.")
    stage = _block(ds_config, "zero_optimization").get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1):
        problems.append(
            f"zero_optimization.stage: must be 0 or 1 in the pipeline; found {stage!r}. "
            "Use 0 or 1, or the Trainer path for ZeRO 2 and 3."
        )
    for block, key, remedy in _REFUSED:
        if _block(ds_config, block).get(key, False):
            problems.append(f"{block}.{key}: must be false in the pipeline; found true. {remedy}")
    if problems:
        raise ConfigError("\n".join(problems))


def require_optimizer(ds_config: dict[str, Any], known: Collection[str]) -> None:
    """Make sure that the configuration names an optimizer that can train a pipeline.

    Parameters
    ----------
    ds_config : dict
        A whole DeepSpeed configuration.
    known : collection of str
        Names that there are: DeepSpeed's in lower case, of which any spelling will do, and those of torch.

    Raises
    ------
    ConfigError
    """
    kind = _block(ds_config, "optimizer").get("type")
    if not isinstance(kind, str) or not {kind, kind.lower()} & set(known):
        raise ConfigError(
            f"optimizer.type must name an optimizer of DeepSpeed or torch, found {kind!r}. "
            f'Add {{"type": "AdamW", "params": {{"lr": 1e-5}}}}, or another of {", ".join(sorted(known))}.'
        )
    if zero_stage(ds_config) == 1 and 1 not in plannable_zero_stages(ds_config):
        raise ConfigError(
            f"optimizer.type must be one of {', '.join(_ZERO_OPTIMIZERS)} with ZeRO 1, found {kind!r}. "
            'Change it, or set "zero_allow_untested_optimizer": true.'
        )


def uses_bf16(ds_config: dict[str, Any]) -> bool:
    """Whether DeepSpeed will train in bf16."""
    return _block(ds_config, "bf16").get("enabled", False) is True


def with_fp32_accumulation(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with bf16 gradients summed in fp32, unless it says otherwise.

    DeepSpeed's default sums the microbatches of a step in bf16, whose 8 bits swallow the last ones of
    many. It knows fp32 sums with ZeRO-1 only; its bf16 optimizer divides its state by replicas anyhow.
    """
    if not uses_bf16(ds_config) or _block(ds_config, "data_types").get("grad_accum_dtype") is not None:
        return ds_config
    changed = {
        **ds_config,
        "data_types": {**_block(ds_config, "data_types"), "grad_accum_dtype": "fp32"},
        "zero_optimization": {**_block(ds_config, "zero_optimization"), "stage": 1},
    }
    if _block(ds_config, "zero_optimization").get("stage", 0) == 0:
        # The same bf16 optimizer as without ZeRO, which wraps any other one.
        changed["zero_allow_untested_optimizer"] = True
    return changed


def plannable_zero_stages(ds_config: dict[str, Any]) -> tuple[int, ...]:
    """ZeRO stages that DeepSpeed accepts in a pipeline with the optimizer of a configuration.

    Stage 1 takes optimizers of a list only, unless ``zero_allow_untested_optimizer`` is set. An optimizer
    that the program brings along is not known here and counts as listed.
    """
    kind = _block(ds_config, "optimizer").get("type")
    is_listed = not isinstance(kind, str) or kind.lower() in _ZERO_OPTIMIZERS
    return (0, 1) if is_listed or ds_config.get("zero_allow_untested_optimizer", False) else (0,)


def zero_stage(ds_config: dict[str, Any]) -> int:
    """DeepSpeed's ZeRO stage, 0 if none is given; :func:`validate_for_pipeline` checks it."""
    stage: int = _block(ds_config, "zero_optimization").get("stage", 0)
    return stage


def reduce_bucket_values(ds_config: dict[str, Any]) -> int:
    """Values in DeepSpeed's bucket of gradients, in both of them where communication overlaps.

    Raises
    ------
    ConfigError
        If ``zero_optimization.reduce_bucket_size`` is not a number of at least 1.
    """
    zero = _block(ds_config, "zero_optimization")
    size = zero.get("reduce_bucket_size", _REDUCE_BUCKET_VALUES)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 1 <= size < math.inf:
        raise ConfigError(
            f"zero_optimization.reduce_bucket_size: must be a number of at least 1; found {size!r}. "
            "Correct or remove it."
        )
    return int(size) * (2 if zero.get("overlap_comm") else 1)


def uses_reentrant_checkpoints(ds_config: dict[str, Any]) -> bool:
    """Whether DeepSpeed's key ``pipeline.use_reentrant`` asks for reentrant checkpointing."""
    return _block(ds_config, "pipeline").get("use_reentrant", False) is True


def _block(ds_config: dict[str, Any], name: str) -> dict[str, Any]:
    value = ds_config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be an object in braces; found {value!r}. Correct or remove it.")
    return value
