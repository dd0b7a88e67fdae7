"""The profile table: measured layer times and the fingerprint of where they were measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dflop_ds.cost.features import ProfileRow, check_rows, check_times
from dflop_ds.cost.files import check_schema, read_json, write_json
from dflop_ds.errors import CostModelError
from dflop_ds.families import model_dims

SCHEMA_VERSION = 2

MismatchPolicy = Literal["warn", "refuse"]

_DEPTH = ("num_layers", "frame_layers")
_CONDITIONS = (
    "device",
    "hardware",
    "dtype",
    "attention",
    "activation_checkpointing",
    "tensor_parallel_degree",
)

_logger = logging.getLogger(__name__)


def model_hash(config: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the dimensions of a model that decide the time of its layers.

    Parameters
    ----------
    config : mapping
        A ``config.json``; see :func:`~dflop_ds.families.model_dims`. Numbers of layers are
        left out: a profile holds the time of one layer and serves any depth.

    Raises
    ------
    CostModelError
        If a dimension is missing.
    """
    dims = model_dims(config).to_dict()
    relevant = {part: {key: value for key, value in dims[part].items() if key not in _DEPTH} for part in dims}
    canonical = json.dumps(relevant, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Where and how a profile was measured.

    Attributes
    ----------
    device : str
        Kind of device, such as ``"cuda"`` or ``"cpu"``.
    hardware : str
        Name of the device, such as ``"NVIDIA H200"``.
    versions : dict of str to str
        Versions of the packages that decide the speed.
    dtype, attention : str
        Compute type and attention implementation.
    activation_checkpointing : bool
        Whether backward times include a second forward.
    model_hash : str
        See :func:`model_hash`.
    tensor_parallel_degree : int
        Ranks over which every layer was cut.
    """

    device: str
    hardware: str
    versions: dict[str, str]
    dtype: str
    attention: str
    activation_checkpointing: bool
    model_hash: str
    tensor_parallel_degree: int = 1


@dataclasses.dataclass(frozen=True)
class ProfileLimit:
    """A microbatch for which the memory of the device did not suffice.

    Attributes
    ----------
    kind : str
        Layer kind that ran out of memory.
    encoder_inputs, media_tokens, llm_tokens, sum_squared_tokens, num_segments, target_tokens : int
        See :class:`~dflop_ds.cost.features.MicrobatchFeatures`.
    sum_squared_windows, sum_squared_frames : int
        As above; 0 for an encoder of fixed tiles.
    """

    kind: str
    encoder_inputs: int
    media_tokens: int
    llm_tokens: int
    sum_squared_tokens: int
    num_segments: int
    target_tokens: int
    sum_squared_windows: int = 0
    sum_squared_frames: int = 0


class ProfileTable:
    """Measured layer times with their fingerprint.

    Parameters
    ----------
    rows : list of ProfileRow
    fingerprint : Fingerprint
    limits : sequence of ProfileLimit
        Where memory ran out.
    parameters : dict of str to int, optional
        Number of parameters of one layer of each kind.

    Raises
    ------
    CostModelError
        If there is no row, or a row has an unknown kind, a size that is zero where there must be work,
        or a time that is negative, NaN or infinite.
    """

    def __init__(
        self,
        rows: list[ProfileRow],
        fingerprint: Fingerprint,
        limits: Sequence[ProfileLimit] = (),
        parameters: Mapping[str, int] | None = None,
    ) -> None:
        check_rows(rows)
        check_times(rows)
        self.rows = list(rows)
        self.fingerprint = fingerprint
        self.limits = list(limits)
        self.parameters = dict(parameters or {})

    def __len__(self) -> int:
        return len(self.rows)

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        write_json(
            path,
            {
                "schema_version": SCHEMA_VERSION,
                "fingerprint": dataclasses.asdict(self.fingerprint),
                "parameters": self.parameters,
                "limits": [dataclasses.asdict(limit) for limit in self.limits],
                "rows": [dataclasses.asdict(row) for row in self.rows],
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> ProfileTable:
        """Read a table written by :meth:`save`.

        Raises
        ------
        CostModelError
            If the file is missing, truncated, of another schema, or has a row that must not be.
        """
        content = read_json(path, "profile table")
        check_schema(content, f"profile table ({path})", SCHEMA_VERSION)
        try:
            fingerprint = _read_fingerprint(content["fingerprint"])
            rows = [ProfileRow(**row) for row in content["rows"]]
            limits = [ProfileLimit(**limit) for limit in content["limits"]]
            parameters = {str(kind): int(number) for kind, number in content["parameters"].items()}
            if min(parameters.values(), default=0) < 0:
                raise ValueError(f"parameters are {parameters}")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CostModelError(
                f"{path} must hold whole rows and a fingerprint; {error!r}. Run `dflop-ds profile` again."
            ) from error
        return cls(rows, fingerprint, limits, parameters)

    def check_model(self, config: Mapping[str, Any], kinds: Iterable[str]) -> None:
        """Check that the profile is of a model and times all of its layers.

        Parameters
        ----------
        config : mapping
            A ``config.json``.
        kinds : iterable of str
            Layer kinds of the model.

        Raises
        ------
        CostModelError
        """
        expected = model_hash(config)
        if self.fingerprint.model_hash != expected:
            raise CostModelError(
                f"the profile must be of this model (model_hash {expected[:12]}), found another model_hash, "
                f"{self.fingerprint.model_hash[:12]}. Run `dflop-ds profile model` for this model."
            )
        missing = sorted(set(kinds) - {row.kind for row in self.rows})
        if missing:
            raise CostModelError(
                f"a profile must time every layer kind of the model, found no rows of {missing}. "
                "Run `dflop-ds profile model` again."
            )

    def check_matches(self, expected: Fingerprint, on_other_conditions: MismatchPolicy = "warn") -> None:
        """Check that the profile describes the run that `expected` describes.

        Parameters
        ----------
        expected : Fingerprint
            Of the run at hand.
        on_other_conditions : {"warn", "refuse"}
            What to do when device, hardware, dtype, attention, activation checkpointing or
            tensor-parallel degree differ: log a warning or raise. Other package versions are logged only.

        Raises
        ------
        CostModelError
            If the profile is of another model, or was taken under other conditions and the policy is
            ``"refuse"``.
        """
        if on_other_conditions not in ("warn", "refuse"):
            raise CostModelError(
                f"on_other_conditions must be 'warn' or 'refuse', found {on_other_conditions!r}. Use one."
            )
        found = self.fingerprint
        if found.model_hash != expected.model_hash:
            raise CostModelError(
                f"the profile must be of this model (model_hash {expected.model_hash[:12]}), found "
                f"{found.model_hash[:12]}. Run `dflop-ds profile` for this model."
            )
        differences = [
            f"{name} {getattr(found, name)!r} instead of {getattr(expected, name)!r}"
            for name in _CONDITIONS
            if getattr(found, name) != getattr(expected, name)
        ]
        if differences:
            message = (
                f"the profile should match the conditions of the run, found {', '.join(differences)}. "
                "Run `dflop-ds profile` on this machine."
            )
            if on_other_conditions == "refuse":
                raise CostModelError(message)
            _logger.warning("%s", message)
        if found.versions != expected.versions:
            _logger.info("the profile was taken with %s, this run has %s", found.versions, expected.versions)


def _read_fingerprint(stored: Mapping[str, Any]) -> Fingerprint:
    fingerprint = Fingerprint(**stored)
    types = {"versions": dict, "activation_checkpointing": bool, "tensor_parallel_degree": int}
    for field in dataclasses.fields(Fingerprint):
        value = getattr(fingerprint, field.name)
        wanted = types.get(field.name, str)
        if not isinstance(value, wanted):
            raise TypeError(f"fingerprint.{field.name} is {value!r}")
    if fingerprint.tensor_parallel_degree < 1:
        raise ValueError(f"fingerprint.tensor_parallel_degree is {fingerprint.tensor_parallel_degree}")
    return fingerprint
