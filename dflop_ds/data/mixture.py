"""Mixtures: several files of records as one data set, each with a sampling rule and a weight."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from dflop_ds.config.base import Block, NonEmptyStr
from dflop_ds.config.explain import explain
from dflop_ds.errors import DataError

logger = logging.getLogger(__name__)

MIXTURE_KEY = "datasets"
"""Key of a mixture file that lists its sources."""

MAX_WEIGHT = 10_000.0
"""Repeats are held in memory one by one."""

_MEDIA_KEYS = ("image", "video", "audio")
_RULE = re.compile(r"(?P<draw>first|end|random):(?P<number>\d+(\.\d+)?)(?P<percent>%?)")


class MixtureSource(Block):
    """One entry of a mixture file."""

    json_path: NonEmptyStr = Field(description="JSON or JSONL file, relative to the mixture file.")
    sampling_strategy: NonEmptyStr = Field(
        default="all",
        description="all, or first:N, end:N, random:N; N may be a percentage such as 25%, which rounds up.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=MAX_WEIGHT,
        description="How often a sampled record occurs in an epoch: 2 is twice, 0.5 is every second "
        "record, drawn by the seed.",
    )
    media_root: NonEmptyStr | None = Field(
        default=None,
        description="Folder that media paths of this file are relative to, itself relative to the mixture "
        "file. null: dflop.data.media_root, or else the folder of the mixture file.",
    )


@dataclasses.dataclass(frozen=True)
class SamplingRule:
    """Which records of a file take part.

    Attributes
    ----------
    draw : {"all", "first", "end", "random"}
    amount : Fraction
        Number of records, or percent of the file.
    is_percent : bool
    """

    draw: str
    amount: Fraction = Fraction(0)
    is_percent: bool = False

    @classmethod
    def parse(cls, text: str) -> SamplingRule:
        """Read ``all``, or ``first``, ``end`` or ``random`` with ``:N`` or ``:P%``.

        Raises
        ------
        DataError
            If the text is none of them, N is no whole number or P is above 100.
        """
        if text == "all":
            return cls("all")
        found = _RULE.fullmatch(text)
        amount = Fraction(found["number"]) if found else Fraction(0)
        is_percent = bool(found and found["percent"])
        if not found or (amount > 100 if is_percent else amount.denominator != 1):
            raise DataError(
                "a sampling strategy must be all, first:N, end:N, random:N, or P% instead of N, with a whole "
                f"number N and a P of at most 100, found {text!r}; correct it (repeat records by weight)."
            )
        return cls(found["draw"], amount, is_percent)

    def select(self, num_records: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Positions of the chosen records, increasing; of a file with fewer than N records, all."""
        if self.draw == "all":
            return np.arange(num_records, dtype=np.int64)
        exact = self.amount * num_records / 100 if self.is_percent else self.amount
        wanted = min(math.ceil(exact), num_records)
        if self.draw != "random":
            start = 0 if self.draw == "first" else num_records - wanted
            return np.arange(start, start + wanted, dtype=np.int64)
        return np.sort(rng.choice(num_records, size=wanted, replace=False)).astype(np.int64)


def repeat_by_weight(
    positions: npt.NDArray[np.int64], weight: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Each position ``floor(weight)`` times, and once more for a random share of the rest.

    The result is increasing and has ``round(weight * len(positions))`` entries.
    """
    times = math.floor(weight)
    num_more = round((weight - times) * len(positions))
    more = rng.choice(positions, size=num_more, replace=False) if num_more else positions[:0]
    return np.sort(np.concatenate([np.repeat(positions, times), more]))


class Mixture:
    """Records of several files, one after the other, as sampled; see :class:`MixtureSource`.

    What is drawn depends on the seed, the place of the source in the mixture and the number of its
    records, and on nothing else. A record that occurs twice takes two positions.

    Parameters
    ----------
    path : Path
        The mixture file, from which relative paths start.
    content : object
        What it holds: ``{"datasets": [{"json_path": ..., "sampling_strategy": ...}, ...]}``.
    seed : int
    open_file : callable
        Opens the records of one JSON or JSONL file.

    Raises
    ------
    DataError
        If an entry is malformed, a file cannot be opened, or no record is left.
    """

    def __init__(self, path: Path, content: Any, *, seed: int, open_file: Any) -> None:
        self._sources = read_sources(path, content)
        self._seed = seed
        self._files = [open_file(path.parent / source.json_path) for source in self._sources]
        # Absolute, since the reader of media puts the folder of the data set before relative paths.
        folder = path.parent.absolute()
        self._roots = [source.media_root and folder / source.media_root for source in self._sources]
        chosen = [self._draw(number) for number in range(len(self._sources))]
        for source, file, positions in zip(self._sources, self._files, chosen, strict=True):
            logger.info("%s: %d samples of %d records", source.json_path, len(positions), len(file))
        self._source_of = np.repeat(np.arange(len(chosen)), [len(positions) for positions in chosen])
        self._position_of = np.concatenate(chosen)
        if not len(self._position_of):
            raise DataError(f"the mixture {path} must hold samples, found none; correct its strategies.")

    def __len__(self) -> int:
        return len(self._position_of)

    def __getitem__(self, index: int) -> Any:
        source, position = self.place(index)
        return _rooted(self._files[source][position], self._roots[source])

    def place(self, index: int) -> tuple[int, int]:
        """Number of the source, and position of the record in it."""
        return int(self._source_of[index]), int(self._position_of[index])

    def fallback_id(self, index: int) -> str:
        """File name and the place in it."""
        source, position = self.place(index)
        return f"{self._sources[source].json_path} {self._files[source].fallback_id(position)}"

    def fingerprint(self) -> list[Any]:
        """What the records depend on."""
        sources = [source.model_dump() for source in self._sources]
        return [self._seed, sources, [file.fingerprint() for file in self._files]]

    def _draw(self, number: int) -> npt.NDArray[np.int64]:
        source = self._sources[number]
        rng = np.random.default_rng([self._seed, number])
        rule = SamplingRule.parse(source.sampling_strategy)
        return repeat_by_weight(rule.select(len(self._files[number]), rng), source.weight, rng)


def load_mixture_file(path: Path) -> Any:
    """Content of a YAML file.

    Raises
    ------
    DataError
        If it is not valid YAML.
    """
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} must be valid YAML, found {error}; correct it.") from error


def read_sources(path: Path, content: Any) -> list[MixtureSource]:
    """Validate the entries of a mixture file, all problems at once.

    Raises
    ------
    DataError
    """
    entries = content.get(MIXTURE_KEY) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries or len(content) != 1:
        is_mapping = isinstance(content, Mapping)
        found = json.dumps([str(key) for key in content]) if is_mapping else type(content).__name__
        raise DataError(
            f'{path} must hold one key "{MIXTURE_KEY}" with a list of at least one source, found {found}; '
            'write {"datasets": [{"json_path": FILE, "sampling_strategy": "all"}]}.'
        )
    sources, problems = [], []
    for number, entry in enumerate(entries):
        try:
            sources.append(MixtureSource.model_validate(entry))
            SamplingRule.parse(sources[-1].sampling_strategy)
        except ValidationError as error:
            problems.append(explain(error, MixtureSource, f"{path}: {MIXTURE_KEY}[{number}]"))
        except DataError as error:
            problems.append(f"{path}: {MIXTURE_KEY}[{number}]: {error}")
    if problems:
        raise DataError("\n".join(problems))
    return sources


def _rooted(record: Any, root: Any) -> Any:
    """The record with its media paths starting at `root`; what is malformed stays for the parser."""
    if not root or not isinstance(record, dict):
        return record

    def join(value: Any) -> Any:
        if isinstance(value, list):
            return [join(entry) for entry in value]
        return str(root / value) if isinstance(value, str) and value and "\0" not in value else value

    return {key: join(value) if key in _MEDIA_KEYS else value for key, value in record.items()}
