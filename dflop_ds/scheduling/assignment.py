"""Which sample is in which bin, how good that is, and how full the bins are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Which samples each bin holds.

    Attributes
    ----------
    bins : tuple of tuple of int
        Sample positions per bin, ascending inside a bin.
    """

    bins: tuple[tuple[int, ...], ...]

    @classmethod
    def from_bin_of(cls, bin_of: Sequence[int] | IntArray, num_bins: int) -> Assignment:
        """Build from the bin index of every sample, shape (num_samples,)."""
        found = np.asarray(bin_of, dtype=np.int64)
        order = np.argsort(found, kind="stable").tolist()
        edges = [0, *np.cumsum(np.bincount(found, minlength=num_bins)).tolist()]
        return cls(tuple(tuple(order[first:last]) for first, last in itertools.pairwise(edges)))

    def bin_of(self) -> IntArray:
        """Bin index of every sample, shape (num_samples,), of a valid assignment."""
        samples = np.fromiter(itertools.chain.from_iterable(self.bins), dtype=np.int64)
        result = np.empty(len(samples), dtype=np.int64)
        result[samples] = np.repeat(np.arange(len(self.bins)), [len(members) for members in self.bins])
        return result

    def validate(self, problem: Problem) -> None:
        """Check that each sample is in exactly one bin and that every cap holds.

        Raises
        ------
        SchedulingError
            If the bins do not partition the samples of `problem`.
        InfeasibleError
            If a bin exceeds a cap.
        """
        remedy = "Solve the problem again; do not edit an assignment by hand."
        if len(self.bins) != problem.num_bins:
            raise SchedulingError(
                f"an assignment must have {problem.num_bins} bins, found {len(self.bins)}. {remedy}"
            )
        if any(list(members) != sorted(members) for members in self.bins):
            raise SchedulingError(f"samples must be ascending inside a bin, found another order. {remedy}")
        found = sorted(sample for members in self.bins for sample in members)
        if found != list(range(problem.num_samples)):
            num_known = len(set(found) & set(range(problem.num_samples)))
            raise SchedulingError(
                f"each of the {problem.num_samples} samples must be in exactly one bin, found "
                f"{len(found)} places for {num_known} of them. {remedy}"
            )
        check_bin_sizes(problem, self.bin_of(), remedy)


def check_bin_sizes(problem: Problem, bin_of: IntArray, remedy: str) -> None:
    """Raise InfeasibleError, which names the bin and the cap, if a bin exceeds a cap or lacks an image."""
    if problem.has_image.size:
        images = np.bincount(bin_of[problem.has_image[: len(bin_of)]], minlength=problem.num_bins)
        if (images == 0).any():
            name = problem.bin_name(int(images.argmin()))
            raise InfeasibleError(f"every bin must hold a sample with an image; {name} holds none. {remedy}")
    if problem.num_caps == 0:
        return
    used = np.zeros((problem.num_bins, problem.num_caps), dtype=np.int64)
    np.add.at(used, bin_of, problem.sizes)
    above = used > problem.caps
    if above.any():
        index, cap = (int(value) for value in np.argwhere(above)[0])
        raise InfeasibleError(
            f"every bin must stay within its caps; {problem.bin_name(index)} holds {used[index, cap]} of "
            f"{problem.cap_names[cap]}, the cap is {problem.caps[cap]}. {remedy}"
        )


@dataclasses.dataclass(frozen=True)
class Solution:
    """An assignment with its quality.

    Attributes
    ----------
    assignment : Assignment
    largest_bin_s : float
        Largest load over bins and modules relative to what the bin should have, seconds.
    bound_s : float
        No assignment can have a largest bin below this, seconds.
    ratio_to_bound : float
        ``largest_bin_s / bound_s``; 1.0 if the bound is 0.
    solver : str
        What made the assignment: "blind", "lpt", "cp_sat", or "optimal" where CP-SAT proved that none has a
        smaller largest bin.
    solve_time_s : float
        Wall-clock time of the solve.
    fallback_reason : str or None
        Why a simpler solver than the requested one was used.
    """

    assignment: Assignment
    largest_bin_s: float
    bound_s: float
    ratio_to_bound: float
    solver: str
    solve_time_s: float
    fallback_reason: str | None


def bin_loads_s(problem: Problem, assignment: Assignment) -> FloatArray:
    """Load of every bin in every module.

    Returns
    -------
    ndarray of float64, shape (num_bins, num_modules)
        Seconds.
    """
    loads_s = np.zeros((problem.num_bins, problem.num_modules))
    np.add.at(loads_s, assignment.bin_of(), problem.costs_s)
    return loads_s


def scaled_loads_s(problem: Problem, bin_of: IntArray) -> FloatArray:
    """Load of every bin in every module, divided by what the bin should have relative to the mean bin.

    A grouped module counts the whole group, relative to the group.

    Returns
    -------
    ndarray of float64, shape (num_bins, num_modules)
        Seconds; equal numbers mean perfect balance.
    """
    loads_s = np.empty((problem.num_bins, problem.num_modules))
    for module in range(problem.num_modules):
        costs_s = problem.costs_s[:, module]
        if module in problem.grouped_modules:
            groups_s = np.bincount(problem.group_of[bin_of], weights=costs_s, minlength=problem.num_bins)
            loads_s[:, module] = groups_s[problem.group_of]
        else:
            loads_s[:, module] = np.bincount(bin_of, weights=costs_s, minlength=problem.num_bins)
    result: FloatArray = loads_s / problem.module_scale
    return result


def imbalance(problem: Problem, assignment: Assignment) -> float:
    """Largest bin over the mean bin, where a bin counts as its largest module load.

    1.0 is perfect balance, and also the value when every cost is zero.
    """
    peaks_s = bin_loads_s(problem, assignment).max(axis=1)
    mean_s = float(peaks_s.mean())
    return float(peaks_s.max()) / mean_s if mean_s > 0 else 1.0
