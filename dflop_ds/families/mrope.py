"""Positions on three axes (time, height, width), as Qwen2.5-VL numbers the tokens of a sample.

Text counts on along all three axes at once. The tokens of an image or clip span a grid that starts
where the text before it stopped; the text after it goes on behind the longer side of the grid. The
temporal axis of a clip is stretched by the seconds between its temporal patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class TokenGrid:
    """LLM tokens of one image or clip.

    Attributes
    ----------
    frames, rows, columns : int
        After merging.
    interval : float
        Positions from one frame to the next, in float32 before it is rounded down; 1 for an image.
    """

    frames: int
    rows: int
    columns: int
    interval: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return self.frames * self.rows * self.columns


def mrope_positions(is_media: npt.NDArray[np.bool_], grids: Sequence[TokenGrid]) -> npt.NDArray[np.int64]:
    """Positions of the tokens of one sample.

    Parameters
    ----------
    is_media : ndarray of bool, shape (num_tokens,)
        Which tokens stand for media.
    grids : sequence of TokenGrid
        In the order of their tokens.

    Returns
    -------
    ndarray of int64, shape (3, num_tokens)
        Temporal, height and width positions.

    Raises
    ------
    DataError
        If the grids do not fill the media tokens.
    """
    wanted, found = int(np.count_nonzero(is_media)), sum(grid.num_tokens for grid in grids)
    if wanted != found:
        raise DataError(
            f"the media of a sample must fill its {wanted} placeholder tokens, found {found} tokens; "
            "probe the data again."
        )
    positions = np.empty((3, len(is_media)), dtype=np.int64)
    media_at = np.flatnonzero(is_media)
    token = position = used = 0
    for grid in grids:
        start = int(media_at[used])
        positions[:, token:start] = position + np.arange(start - token)
        position += start - token
        stop = start + grid.num_tokens
        positions[:, start:stop] = position + _grid_positions(grid)
        position += max(grid.rows, grid.columns)
        token, used = stop, used + grid.num_tokens
    positions[:, token:] = position + np.arange(len(is_media) - token)
    return positions


def _grid_positions(grid: TokenGrid) -> npt.NDArray[np.int64]:
    """Positions inside a grid, shape (3, num_tokens); single precision as in the model."""
    time = (np.arange(grid.frames, dtype=np.float32) * np.float32(grid.interval)).astype(np.int64)
    axes = np.meshgrid(time, np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
    stacked: npt.NDArray[np.int64] = np.stack(axes).reshape(3, -1)
    return stacked
