"""What the cost model sees of a microbatch, its sizes, and of a profile, its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import CostModelError
from dflop_ds.shapes import ShapeTable

FloatArray = npt.NDArray[np.float64]

_LARGEST_SIZE = 1 << 53
"""Whole numbers up to this are exact in float64, and products with model dimensions cannot overflow."""
_SHORTEST_S, _LONGEST_S = 1e-12, 1e6
"""A positive time outside of this was not measured by a clock, and its inverse could overflow."""

LAYER_KINDS = (
    "vision_embed",
    "vision_block",
    "vision_window_block",
    "vision_frame_block",
    "projector",
    "token_embed",
    "decoder_block",
    "norm",
    "head",
)
"""``vision_block`` attends inside fixed tiles; the blocks of an encoder of native resolution attend
inside windows or inside frames, whose sizes vary."""

ENCODER_KINDS = ("vision_embed", "vision_block", "vision_window_block", "vision_frame_block", "projector")
"""Kinds that do nothing, and cost nothing, in a microbatch without media."""

_SIZE_FIELDS = (
    "encoder_inputs",
    "media_tokens",
    "llm_tokens",
    "sum_squared_tokens",
    "num_segments",
    "target_tokens",
    "sum_squared_windows",
    "sum_squared_frames",
)

_FEATURES: dict[str, tuple[str, ...]] = {
    "vision_embed": ("encoder_inputs",),
    "vision_block": ("encoder_inputs",),
    "vision_window_block": ("encoder_inputs", "sum_squared_windows"),
    "vision_frame_block": ("encoder_inputs", "sum_squared_frames"),
    "projector": ("encoder_inputs", "media_tokens"),
    "token_embed": ("llm_tokens",),
    "decoder_block": ("llm_tokens", "sum_squared_tokens", "num_segments"),
    "norm": ("llm_tokens",),
    "head": ("llm_tokens", "target_tokens"),
}


def check_kind(kind: str) -> None:
    """Raise :class:`CostModelError` unless `kind` is one of :data:`LAYER_KINDS`."""
    if kind not in LAYER_KINDS:
        raise CostModelError(
            f"a layer kind must be one of {list(LAYER_KINDS)}, found {kind!r}. Use one of these names."
        )


def feature_names(kind: str) -> tuple[str, ...]:
    """Names of the features that the time of a layer kind depends on, in the order of the columns.

    Raises
    ------
    CostModelError
        If the kind is unknown.
    """
    check_kind(kind)
    return _FEATURES[kind]


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """One measurement: a layer of a kind on a microbatch of a given size.

    Attributes
    ----------
    kind : str
        One of :data:`~dflop_ds.cost.features.LAYER_KINDS`.
    encoder_inputs, media_tokens, llm_tokens, sum_squared_tokens, num_segments, target_tokens : int
        See :class:`MicrobatchFeatures`.
    forward_s, backward_s : float
        Measured seconds of one layer.
    activation_bytes : int
        What one layer keeps from its forward for its backward pass, without activation checkpointing;
        0 where it was not measured.
    sum_squared_windows, sum_squared_frames : int
        See :class:`MicrobatchFeatures`; 0 for an encoder of fixed tiles.
    """

    kind: str
    encoder_inputs: int
    media_tokens: int
    llm_tokens: int
    sum_squared_tokens: int
    num_segments: int
    target_tokens: int
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    sum_squared_windows: int = 0
    sum_squared_frames: int = 0


@dataclasses.dataclass(frozen=True)
class MicrobatchFeatures:
    """Sizes of n microbatches.

    Attributes
    ----------
    encoder_inputs : ndarray of float64, shape (n,)
        Tiles plus frames, patches for an encoder of native resolution, or positions of an audio encoder.
    media_tokens, llm_tokens, target_tokens : ndarray of float64, shape (n,)
        Media placeholders, whole packed length and supervised positions, in tokens.
    sum_squared_tokens : ndarray of float64, shape (n,)
        Sum over the packed segments of length squared, in tokens^2.
    num_segments : ndarray of float64, shape (n,)
        Samples packed into the microbatch.
    sum_squared_windows, sum_squared_frames : ndarray of float64, shape (n,), optional
        Sum over the attention windows, or over the frames, of an encoder of native resolution, of
        patches squared. By default zero.

    Raises
    ------
    CostModelError
        If the lengths differ or a value is negative, NaN or infinite.
    """

    encoder_inputs: FloatArray
    media_tokens: FloatArray
    llm_tokens: FloatArray
    sum_squared_tokens: FloatArray
    num_segments: FloatArray
    target_tokens: FloatArray
    sum_squared_windows: FloatArray | None = None
    sum_squared_frames: FloatArray | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            column = np.zeros(len(self)) if given is None else np.asarray(given, dtype=np.float64)
            object.__setattr__(self, field.name, column)
            if column.shape != (len(self),):
                raise CostModelError(
                    f"feature {field.name!r} must have shape ({len(self)},), found {column.shape}. "
                    "Give every feature one entry per microbatch."
                )
            bad = ~(np.isfinite(column) & (column >= 0))
            if bad.any():
                row = int(bad.argmax())
                raise CostModelError(
                    f"feature {field.name!r} must be finite and not negative, found {column[row]} at "
                    f"microbatch {row}. Check the shapes of its samples."
                )

    def __len__(self) -> int:
        return int(np.size(self.encoder_inputs))

    @classmethod
    def from_rows(cls, rows: Sequence[ProfileRow]) -> MicrobatchFeatures:
        """Sizes of measurements, n = ``len(rows)``."""
        return cls(*(np.array([getattr(row, name) for row in rows], dtype=float) for name in _SIZE_FIELDS))

    @classmethod
    def from_shapes(cls, table: ShapeTable) -> MicrobatchFeatures:
        """Every sample as its own microbatch, n = ``len(table)``."""
        return cls(*_sample_columns(table))

    @classmethod
    def from_bins(cls, table: ShapeTable, bins: Sequence[Sequence[int]]) -> MicrobatchFeatures:
        """One microbatch per bin, n = ``len(bins)``.

        Parameters
        ----------
        table : ShapeTable
        bins : sequence of sequences of int
            Positions in `table` of the samples of each bin. An empty bin has size zero.

        Raises
        ------
        CostModelError
            If a position is outside the table.
        """
        sizes = [len(positions) for positions in bins]
        flat = np.fromiter(
            (position for positions in bins for position in positions), dtype=np.int64, count=sum(sizes)
        )
        outside = (flat < 0) | (flat >= len(table))
        if outside.any():
            raise CostModelError(
                f"positions in bins must be in 0..{len(table) - 1}, found {int(flat[outside][0])}. "
                "Use positions in the table that is passed with the bins."
            )
        bin_of = np.repeat(np.arange(len(bins)), sizes)
        columns: list[FloatArray] = []
        for column in _sample_columns(table):
            columns.append(np.bincount(bin_of, column[flat], len(bins)).astype(np.float64))
        return cls(*columns)

    def matrix(self, kind: str) -> FloatArray:
        """Features of a layer kind, shape (n, k), columns in the order of :func:`feature_names`."""
        return np.column_stack([getattr(self, name) for name in feature_names(kind)])

    def work_mask(self, kind: str) -> npt.NDArray[np.bool_]:
        """Which microbatches give a layer of this kind anything to do, shape (n,)."""
        check_kind(kind)
        if kind in ENCODER_KINDS:
            return self.encoder_inputs > 0
        return np.ones(len(self), dtype=np.bool_)


def check_rows(rows: Sequence[ProfileRow]) -> None:
    """Check that measurements can be learned from.

    Raises
    ------
    CostModelError
        Naming the row: no rows, an unknown kind, a size that is not a whole number from 0 to 2^53, a time
        that is neither 0 nor from 1e-12 to 1e6 s, an encoder kind without encoder inputs, or an LLM kind
        without tokens or segments.
    """
    if not rows:
        raise CostModelError("a profile must have at least one row, found none. Run `dflop-ds profile`.")
    for index, row in enumerate(rows):
        problem = _row_problem(row)
        if problem:
            raise CostModelError(f"profile row {index} ({row.kind}) {problem}. Profile the layer again.")


def check_times(rows: Sequence[ProfileRow]) -> None:
    """Raise :class:`CostModelError` if some layer kind has no forward time above 0 s in any row."""
    untimed = sorted({row.kind for row in rows} - {row.kind for row in rows if row.forward_s > 0})
    if untimed:
        raise CostModelError(
            f"a layer kind must have a forward time above 0 in some row, found none for {untimed}. "
            "Profile the layers again."
        )


def _row_problem(row: ProfileRow) -> str | None:
    check_kind(row.kind)
    for name in (*_SIZE_FIELDS, "activation_bytes"):
        size = getattr(row, name)
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not whole or not 0 <= size <= _LARGEST_SIZE:
            return f"must have a whole number from 0 to 2^53 as {name}, found {_short(size)}"
    for name in ("forward_s", "backward_s"):
        time_s = getattr(row, name)
        number = isinstance(time_s, (int, float)) and not isinstance(time_s, bool)
        if not number or not (time_s == 0 or _SHORTEST_S <= time_s <= _LONGEST_S):
            return (
                f"must have 0 or {_SHORTEST_S:g} to {_LONGEST_S:g} seconds as {name}, found {_short(time_s)}"
            )
    needed = ("encoder_inputs",) if row.kind in ENCODER_KINDS else ("llm_tokens", "num_segments")
    empty = [name for name in needed if getattr(row, name) == 0]
    return f"must have {' and '.join(empty)} of at least 1, found 0" if empty else None


def _short(value: object) -> str:
    """How a value looks, without the hundreds of digits that a damaged number may have."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


def _sample_columns(table: ShapeTable) -> tuple[FloatArray, ...]:
    llm_tokens = table.llm_tokens.astype(np.float64)
    return (
        table.encoder_inputs.astype(np.float64),
        (table.llm_tokens - table.text_tokens).astype(np.float64),
        llm_tokens,
        llm_tokens * llm_tokens,
        np.ones(len(table)),
        table.target_tokens.astype(np.float64),
        table.sum_squared_windows.astype(np.float64),
        table.sum_squared_frames.astype(np.float64),
    )
