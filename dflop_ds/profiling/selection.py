"""Which microbatches are profiled: spread over what the data set really contains."""

from __future__ import annotations

import numpy as np

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.shapes import ShapeTable

_CANDIDATES_PER_SHAPE = 24


def choose_microbatches(
    table: ShapeTable, samples_per_bin: int, num_shapes: int, seed: int
) -> list[list[int]]:
    """Microbatches to time, of one sample up to twice the usual number.

    Candidates are random samples in bins of every size; samples may repeat inside a bin, so that even
    a data set of one sample gives several sizes. Chosen are the shortest sample alone, the largest bin
    full of the longest samples, and then in turn the candidate farthest from all chosen ones (in
    logarithms of the sizes, so that the range is filled evenly) and a random one (so that frequent
    shapes are frequent in the profile).

    Parameters
    ----------
    table : ShapeTable
    samples_per_bin : int
        Samples of a usual microbatch.
    num_shapes : int
        Microbatches to choose.
    seed : int

    Returns
    -------
    list of list of int
        Rows of `table`; both ends of the range come first, and any longer prefix covers it.
    """
    rng = np.random.default_rng(seed)
    largest = max(2, 2 * samples_per_bin)
    num_candidates = _CANDIDATES_PER_SHAPE * num_shapes
    sizes = [1 + int(_spread(index) * largest) for index in range(num_candidates)]
    tokens = table.llm_tokens
    heaviest = np.resize(np.argsort(-tokens, kind="stable"), largest)
    candidates = [[int(tokens.argmin())], heaviest.tolist()]
    candidates += [rng.integers(len(table), size=size).tolist() for size in sizes]
    points = _log_sizes(MicrobatchFeatures.from_bins(table, candidates))
    chosen = [0, 1]
    distance = np.minimum(_distance(points, 0), _distance(points, 1))
    for turn in range(2, num_shapes):
        if turn % 2:
            following = int(rng.integers(2, len(candidates)))
        else:
            following = int(distance.argmax())
        chosen.append(following)
        distance = np.minimum(distance, _distance(points, following))
    return [candidates[index] for index in chosen[:num_shapes]]


def _log_sizes(features: MicrobatchFeatures) -> FloatArray:
    sizes = (
        features.encoder_inputs,
        features.llm_tokens,
        features.sum_squared_tokens,
        features.num_segments,
        features.target_tokens,
    )
    points = np.log1p(np.column_stack(sizes))
    spread = np.ptp(points, axis=0)
    scaled: FloatArray = points / np.where(spread > 0, spread, 1.0)
    return scaled


def _distance(points: FloatArray, index: int) -> FloatArray:
    distance: FloatArray = np.abs(points - points[index]).max(axis=1)
    return distance


def _spread(index: int) -> float:
    """Van der Corput's sequence in [0, 1): the bits of ``index`` mirrored at the point."""
    value, weight = 0.0, 0.5
    while index:
        value, weight, index = value + weight * (index & 1), weight / 2, index >> 1
    return value
