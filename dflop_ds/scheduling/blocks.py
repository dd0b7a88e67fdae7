"""Large worlds in parts: blocks of bins that are searched on their own."""

from __future__ import annotations

import dataclasses

import numpy as np

from dflop_ds.scheduling.assignment import scaled_loads_s
from dflop_ds.scheduling.problem import IntArray, Problem

_LARGEST_BLOCK = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A part of a problem.

    Attributes
    ----------
    problem : Problem
        One replica with the block's bins as microbatches.
    bin_of : ndarray of int64, shape (num_block_samples,)
        Present bin of each sample, within the block.
    samples : ndarray of int64, shape (num_block_samples,)
        Positions in the whole problem.
    """

    problem: Problem
    bin_of: IntArray
    samples: IntArray


def split_bins(problem: Problem, bin_of: IntArray) -> list[IntArray]:
    """Deal the bins into blocks of at most 256 with about the same loads, full and empty bins in each.

    A problem with grouped modules stays whole, as its bins are not independent.

    Returns
    -------
    list of ndarray of int64
        Bins of each block, ascending.
    """
    num_blocks = -(-problem.num_bins // _LARGEST_BLOCK)
    if num_blocks == 1 or problem.grouped_modules:
        return [np.arange(problem.num_bins)]
    order = np.argsort(-scaled_loads_s(problem, bin_of).max(axis=1), kind="stable")
    lap, place = np.divmod(np.arange(problem.num_bins), num_blocks)
    block = np.where(lap % 2 == 0, place, num_blocks - 1 - place)
    return [np.sort(order[block == index]) for index in range(num_blocks)]


def block_problem(problem: Problem, bin_of: IntArray, bins: IntArray) -> Block:
    """The problem of the given bins (ascending) and the samples that they hold."""
    samples = np.flatnonzero(np.isin(bin_of, bins))
    part = Problem(
        costs_s=problem.costs_s[samples],
        num_replicas=1,
        num_microbatches=len(bins),
        sizes=problem.sizes[samples],
        caps=problem.caps,
        cap_names=problem.cap_names,
        bin_weights=problem.bin_scale[bins],
        has_image=problem.has_image[samples] if problem.has_image.size else problem.has_image,
    )
    return Block(part, np.searchsorted(bins, bin_of[samples]), samples)
