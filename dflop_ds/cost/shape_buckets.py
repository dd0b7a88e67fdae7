"""Kinds of samples whose predictions are corrected together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray
from dflop_ds.shapes import ShapeTable


class ShapeBuckets:
    """Which shape bucket a sample belongs to: no media, few or many encoder inputs; short or long.

    The borders are medians of the data set, so that every bucket is seen often.

    Parameters
    ----------
    table : ShapeTable
    """

    num_buckets = 6

    def __init__(self, table: ShapeTable) -> None:
        inputs, tokens = table.encoder_inputs, table.llm_tokens
        middle_inputs = float(np.median(inputs[inputs > 0])) if (inputs > 0).any() else 0.0
        media = np.where(inputs == 0, 0, np.where(inputs <= middle_inputs, 1, 2))
        self.of_sample: npt.NDArray[np.int64] = np.zeros(len(table), dtype=np.int64)
        for group in range(3):
            members = media == group
            if members.any():
                self.of_sample[members] = 2 * group + (tokens[members] > np.median(tokens[members]))

    def split(self, positions: Sequence[int], costs_s: FloatArray) -> FloatArray:
        """Sum of per-sample costs by bucket: shape (num_buckets, num_stages).

        Parameters
        ----------
        positions : sequence of int
            Samples of a microbatch.
        costs_s : ndarray, shape (n, num_stages)
            Of all samples of the table.
        """
        total_s = np.zeros((self.num_buckets, costs_s.shape[1]))
        index = np.asarray(positions, dtype=np.int64)
        np.add.at(total_s, self.of_sample[index], costs_s[index])
        return total_s
