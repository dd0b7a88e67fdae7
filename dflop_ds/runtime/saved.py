"""Reading a checkpoint by parameter name, whatever the ranks were that wrote it."""

from __future__ import annotations

import collections
import dataclasses
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from dflop_ds.errors import ModelError

SCHEMA_VERSION = 1
MAIN_FILE = "dflop.json"
RANK_FILES = "dflop-rank{:05d}.json"

_CHECKSUM = "crc32"
_STAGE_FILES = "mp_rank_{:02d}_model_states.pt"
_MAIN_KEYS = ("num_ranks", "model", "family_module", "layout", "position", "plans", "correction")
_RANK_KEYS = ("stage", "layers", "optimizer", "random", "planning", "num_measured_steps")


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """What the optimizer of a checkpoint knew of one parameter.

    Attributes
    ----------
    master : Tensor or None
        fp32 weights, shape (numel,); None where the optimizer worked on the model's own weights.
    state : dict
        Optimizer state by key: tensors of shape (numel,) for what is kept per element, anything else as
        it was saved.
    options : dict
        Options of its parameter group, such as "lr".
    """

    master: torch.Tensor | None
    state: dict[str, Any]
    options: dict[str, Any]


class SavedCheckpoint:
    """One checkpoint directory.

    Parameters
    ----------
    directory : Path
        Holds ``dflop.json`` beside DeepSpeed's files.

    Raises
    ------
    ModelError
        If it is no checkpoint of dflop_ds, incomplete or of another schema.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.main = self._json(MAIN_FILE, _MAIN_KEYS)
        ranks = range(int(self.main["num_ranks"]))
        self.ranks = [self._json(RANK_FILES.format(rank), _RANK_KEYS) for rank in ranks]
        self._opened: dict[str, Any] = {}
        self._layer: tuple[int, dict[str, torch.Tensor]] = (-1, {})
        self._pieces: dict[str, list[tuple[str, list[int]]]] = {}
        for name, by_stage in self._pieces_by_stage().items():
            self._pieces[name] = by_stage[min(by_stage)]

    @staticmethod
    def exists(directory: Path) -> bool:
        """Whether a directory is a complete checkpoint of dflop_ds."""
        return (directory / MAIN_FILE).is_file()

    @staticmethod
    def is_damaged(directory: Path) -> bool:
        """Whether a directory was a checkpoint of dflop_ds and has lost its main file."""
        return not SavedCheckpoint.exists(directory) and (directory / RANK_FILES.format(0)).exists()

    def require_files(self, reader: int = 0, num_readers: int = 1, *, weights_only: bool = False) -> None:
        """Make sure that DeepSpeed's files are there and hold what was written; each reader reads its share.

        Parameters
        ----------
        reader, num_readers : int
            Number of this process among those that share the work.
        weights_only : bool
            Leave out what holds the optimizer's state alone.

        Raises
        ------
        ModelError
            Naming every file of this share that is missing or damaged.
        """
        names = {f"layer_{layer:02d}-model_states.pt" for layer, _ in self.weights().values()}
        names |= {_STAGE_FILES.format(stage) for stage in range(len(self.main["layout"]["boundaries"]) - 1)}
        if not weights_only:
            names |= {rank["optimizer"]["file"] for rank in self.ranks} - {""}
        bad = [name for name in sorted(names)[reader::num_readers] if not _is_whole(self.directory / name)]
        if bad:
            raise ModelError(
                f"{self.directory} must hold a whole checkpoint, found {bad} missing or damaged; restore "
                "them, or name an older checkpoint."
            )

    @property
    def num_steps(self) -> int:
        """Steps that were trained; 0 where no position was kept."""
        return int((self.main["position"] or {}).get("step", 0))

    def weights(self) -> dict[str, tuple[int, str]]:
        """Layer and local name of every weight, by its name in the ``transformers`` state dict."""
        by_layer = {int(layer): names for rank in self.ranks for layer, names in rank["layers"].items()}
        return {
            name: (layer, local) for layer, names in sorted(by_layer.items()) for local, name in names.items()
        }

    def weight(self, layer: int, local_name: str) -> torch.Tensor:
        """One weight as it was trained.

        Raises
        ------
        ModelError
            If its file is gone, or does not hold it.
        """
        if layer != self._layer[0]:
            found = sorted(self.directory.glob(f"layer_{layer:02d}-*model_states.pt"))
            self._layer = (layer, dict(_open(found[0])) if found else {})
        if local_name not in self._layer[1]:
            raise ModelError(
                f"{self.directory} must hold the weight {local_name} of layer {layer}, found none; use a "
                "complete checkpoint."
            )
        return self._layer[1][local_name]

    def master(self, layer: int, local_name: str) -> torch.Tensor | None:
        """fp32 master copy of a weight, shape (numel,); None where there is none."""
        tied_key = self.main["layout"]["tied_keys"][layer]
        owner = str(layer) if tied_key is None else f"tied_modules.{tied_key}"
        found = self.parameter(f"{owner}.{local_name}")
        return None if found is None else found.master

    def weight_of(self, name: str) -> torch.Tensor:
        """One weight as it was trained, by its name in the pipeline module."""
        owner, _, local_name = name.partition(".")
        if owner != "tied_modules":
            return self.weight(int(owner), local_name)
        tied_key, _, local_name = local_name.partition(".")
        return self.weight(self.main["layout"]["tied_keys"].index(tied_key), local_name)

    def parameter(self, name: str) -> SavedParameter | None:
        """State of a parameter by its name in the pipeline module; None if it was not trained."""
        pieces = self._pieces.get(name)
        if pieces is None:
            return None
        if len(pieces[0][1]) == 2:
            file, (group, index) = pieces[0]
            saved = self._file(file)["optimizer"]
            return SavedParameter(
                None, _flattened(saved["state"].get(index, {})), _options(saved["param_groups"][group])
            )
        return self._joined(pieces)

    def _joined(self, pieces: list[tuple[str, list[int]]]) -> SavedParameter:
        """Put a parameter together from the partitions that hold parts of it."""
        numel = sum(piece[3] for _, piece in pieces)
        joined: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for file, (group, start, own_start, length) in pieces:
            saved = self._file(file)["optimizer_state_dict"]
            base = saved["base_optimizer_state"]
            state = base[group] if isinstance(base, list) else base["state"].get(group, {})
            options = {} if isinstance(base, list) else _options(base["param_groups"][group])
            flat = saved["single_partition_of_fp32_groups"][group]
            for key, value in {"": flat, **state}.items():
                if not (isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) >= len(flat)):
                    joined[key] = value
                    continue
                if key not in joined:
                    joined[key] = torch.empty(numel, dtype=value.dtype)
                joined[key][own_start : own_start + length] = value[start : start + length]
        return SavedParameter(joined.pop(""), joined, options)

    def _pieces_by_stage(self) -> dict[str, dict[int, list[tuple[str, list[int]]]]]:
        pieces: dict[str, dict[int, list[tuple[str, list[int]]]]] = collections.defaultdict(dict)
        for rank in self.ranks:
            saved = rank["optimizer"]
            for name, piece in saved["parameters"].items():
                pieces[name].setdefault(rank["stage"], []).append((saved["file"], piece))
        return pieces

    def _file(self, name: str) -> Any:
        if name not in self._opened:
            self._opened[name] = _open(self.directory / name)
        return self._opened[name]

    def _json(self, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
        path = self.directory / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"a checkpoint must hold {name}, found {error}; name the folder of one checkpoint, as "
                "written by engine.save_checkpoint()."
            ) from error
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ModelError(
                f"{path} must have schema_version {SCHEMA_VERSION}, found {version!r}; "
                "read it with the dflop_ds that wrote it."
            )
        checksum = content.pop(_CHECKSUM, None)
        if checksum is not None and checksum != _checksum(content):
            raise ModelError(f"{path} must be as it was written, found it changed; name an older checkpoint.")
        missing = [key for key in keys if key not in content]
        if missing:
            raise ModelError(
                f"{path} must be complete, found it without {missing}; name an older checkpoint."
            )
        return dict(content)


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write a file of a checkpoint with a checksum of its content."""
    content = {"schema_version": SCHEMA_VERSION, **content}
    path.write_text(json.dumps({**content, _CHECKSUM: _checksum(content)}), encoding="utf-8")


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _is_whole(path: Path) -> bool:
    """Whether a file that torch has saved is there, not cut off and not changed since."""
    try:
        # A ZIP archive: its directory comes last, with a checksum of everything in it.
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # a damaged header may look like anything: another compression, a password, an odd name
        return False


def _open(path: Path) -> Any:
    """A file of DeepSpeed, with its tensors left on disk until they are used."""
    # DeepSpeed's own files hold objects beside tensors; a checkpoint is as trusted as a program.
    try:
        return torch.load(str(path), map_location="cpu", mmap=True, weights_only=False)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{path} must be a file that torch has saved, found {found}; use an older checkpoint."
        ) from error


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _flattened(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.flatten() if isinstance(value, torch.Tensor) and value.dim() > 0 else value
        for key, value in state.items()
    }
