"""The scheduling problem: samples with predicted costs, bins, hard limits, and their assignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import InfeasibleError, SchedulingError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def _no_sizes() -> IntArray:
    return np.zeros((0, 0), dtype=np.int64)


def _no_caps() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """One global batch to be put into bins.

    A bin is one (replica, microbatch) slot, at index ``replica * num_microbatches + microbatch``.

    Attributes
    ----------
    costs_s : ndarray of float64, shape (num_samples, num_modules)
        Predicted seconds of each sample in each module or pipeline stage.
    num_replicas : int
        Data-parallel replicas.
    num_microbatches : int
        Microbatches that one replica runs in the step.
    sizes : ndarray of int64, shape (num_samples, num_caps)
        What each sample takes of each hard limit (tokens, tiles, bytes).
    caps : ndarray of int64, shape (num_caps,)
        Largest total of each size in one bin. Empty: no limits.
    cap_names : tuple of str
        One name per cap, for messages.
    sample_ids : tuple of str
        Names of the samples for messages; empty: positions are named.

    Raises
    ------
    SchedulingError
        If a cost is negative, NaN or infinite, or shapes do not match.
    InfeasibleError
        If one sample alone exceeds a cap.
    """

    costs_s: FloatArray
    num_replicas: int
    num_microbatches: int
    sizes: IntArray = dataclasses.field(default_factory=_no_sizes)
    caps: IntArray = dataclasses.field(default_factory=_no_caps)
    cap_names: tuple[str, ...] = ()
    sample_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        costs_s = np.array(self.costs_s, dtype=np.float64)
        if costs_s.ndim != 2 or costs_s.shape[1] == 0:
            raise SchedulingError(
                f"costs_s must have shape (num_samples, num_modules >= 1), found {costs_s.shape}. "
                "Give one column of seconds per module."
            )
        sizes, caps = _integers(self.sizes, "sizes"), _integers(self.caps, "caps")
        if caps.shape == (0,) and sizes.size == 0:
            sizes = np.zeros((len(costs_s), 0), dtype=np.int64)
        for name, value in (("costs_s", costs_s), ("sizes", sizes), ("caps", caps)):
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "cap_names", tuple(self.cap_names))
        object.__setattr__(self, "sample_ids", tuple(self.sample_ids))
        _check_shapes(self)
        _check_costs(self)
        _check_caps(self)

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return int(self.costs_s.shape[0])

    @property
    def num_modules(self) -> int:
        """Modules or stages with a cost column."""
        return int(self.costs_s.shape[1])

    @property
    def num_caps(self) -> int:
        """Hard limits per bin."""
        return int(self.caps.shape[0])

    @property
    def num_bins(self) -> int:
        """Bins of the step: replicas times microbatches."""
        return self.num_replicas * self.num_microbatches

    def sample_name(self, position: int) -> str:
        """Name of a sample for messages: its id, or its position."""
        return repr(self.sample_ids[position]) if self.sample_ids else f"at position {position}"

    def bin_name(self, index: int) -> str:
        """Name of a bin for messages."""
        replica, microbatch = divmod(index, self.num_microbatches)
        return f"bin {index} (replica {replica}, microbatch {microbatch})"


def _integers(values: npt.ArrayLike, name: str) -> IntArray:
    raw = np.asarray(values)
    if raw.size and raw.dtype.kind not in "iu":
        raise SchedulingError(
            f"{name} must hold integers, found dtype {raw.dtype}. Round up before scheduling."
        )
    return np.array(raw, dtype=np.int64)


def _check_shapes(problem: Problem) -> None:
    for name in ("num_replicas", "num_microbatches"):
        if getattr(problem, name) < 1:
            raise SchedulingError(
                f"{name} must be at least 1, found {getattr(problem, name)}. Correct the plan."
            )
    if problem.caps.ndim != 1:
        raise SchedulingError(
            f"caps must have one dimension, found shape {problem.caps.shape}. Give one number per cap."
        )
    expected = (problem.num_samples, problem.num_caps)
    if problem.sizes.shape != expected:
        raise SchedulingError(
            f"sizes must have shape (num_samples, num_caps) = {expected}, found {problem.sizes.shape}. "
            "Give one row per sample and one column per cap."
        )
    if len(problem.cap_names) != problem.num_caps:
        raise SchedulingError(
            f"cap_names must name each of the {problem.num_caps} caps, found {problem.cap_names}. "
            "Name every cap."
        )
    if problem.sample_ids and len(problem.sample_ids) != problem.num_samples:
        raise SchedulingError(
            f"sample_ids must name each of the {problem.num_samples} samples, found "
            f"{len(problem.sample_ids)} names. Give one id per sample, or none."
        )


def _check_costs(problem: Problem) -> None:
    wrong = ~np.isfinite(problem.costs_s) | (problem.costs_s < 0)
    if wrong.any():
        sample, module = (int(index) for index in np.argwhere(wrong)[0])
        raise SchedulingError(
            f"costs must be finite and not negative, found {problem.costs_s[sample, module]} s for sample "
            f"{problem.sample_name(sample)} in module {module}. Check the cost model's prediction for it."
        )


def _check_caps(problem: Problem) -> None:
    if (problem.caps < 0).any() or (problem.sizes < 0).any():
        raise SchedulingError(
            "sizes and caps must not be negative, found a negative value. Correct the limits."
        )
    above = problem.sizes > problem.caps
    if above.any():
        sample, cap = (int(index) for index in np.argwhere(above)[0])
        raise InfeasibleError(
            f"every sample must fit into an empty bin; sample {problem.sample_name(sample)} needs "
            f"{problem.sizes[sample, cap]} of {problem.cap_names[cap]}, the cap is {problem.caps[cap]}. "
            f"Raise the cap of {problem.cap_names[cap]}, or drop the sample."
        )


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
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        for sample, index in enumerate(bin_of):
            bins[int(index)].append(sample)
        return cls(tuple(tuple(members) for members in bins))

    def bin_of(self) -> IntArray:
        """Bin index of every sample, shape (num_samples,), of a valid assignment."""
        result = np.empty(sum(len(members) for members in self.bins), dtype=np.int64)
        for index, members in enumerate(self.bins):
            result[list(members)] = index
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
    """Raise InfeasibleError, which names the bin and the cap, if a bin exceeds a cap."""
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
        Largest load over bins and modules, seconds.
    bound_s : float
        No assignment can have a largest bin below this, seconds.
    ratio_to_bound : float
        ``largest_bin_s / bound_s``; 1.0 if the bound is 0.
    solver : str
        What made the assignment: "blind", "lpt" or "cp_sat".
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


def bin_costs_s(problem: Problem, assignment: Assignment) -> FloatArray:
    """Load of every bin in every module.

    Returns
    -------
    ndarray of float64, shape (num_bins, num_modules)
        Seconds.
    """
    loads_s = np.zeros((problem.num_bins, problem.num_modules))
    np.add.at(loads_s, assignment.bin_of(), problem.costs_s)
    return loads_s


def imbalance(problem: Problem, assignment: Assignment) -> float:
    """Largest bin over the mean bin, where a bin counts as its largest module load.

    1.0 is perfect balance, and also the value when every cost is zero.
    """
    peaks_s = bin_costs_s(problem, assignment).max(axis=1)
    mean_s = float(peaks_s.mean())
    return float(peaks_s.max()) / mean_s if mean_s > 0 else 1.0
