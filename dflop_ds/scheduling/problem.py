"""The scheduling problem: samples with predicted costs, bins, hard limits, and their assignment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling import checks

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def _no_sizes() -> IntArray:
    return np.zeros((0, 0), dtype=np.int64)


def _no_caps() -> IntArray:
    return np.zeros(0, dtype=np.int64)


def _no_weights() -> FloatArray:
    return np.zeros(0)


def _no_images() -> npt.NDArray[np.bool_]:
    return np.zeros(0, dtype=np.bool_)


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
    bin_weights : ndarray of float64, shape (num_bins,)
        Target load of each bin relative to the others. Empty: equal bins.
    replica_speeds : ndarray of float64, shape (num_replicas,)
        How fast each replica computes relative to the costs. Empty: all alike.
    grouped_modules : tuple of int
        Modules (an encoder) that serve several replicas at once: their load counts per group of bins.
    replicas_per_group : int
        Consecutive replicas that share one replica of the grouped modules.
    has_image : ndarray of bool, shape (num_samples,)
        If given, every bin must hold a sample that has an image. Empty: no such rule.

    Raises
    ------
    SchedulingError
        If a cost is negative, NaN or infinite, a weight or speed is not positive and finite, or shapes do
        not match.
    InfeasibleError
        If one sample alone exceeds a cap, or fewer samples with an image than bins are given.
    """

    costs_s: FloatArray
    num_replicas: int
    num_microbatches: int
    sizes: IntArray = dataclasses.field(default_factory=_no_sizes)
    caps: IntArray = dataclasses.field(default_factory=_no_caps)
    cap_names: tuple[str, ...] = ()
    sample_ids: tuple[str, ...] = ()
    bin_weights: FloatArray = dataclasses.field(default_factory=_no_weights)
    replica_speeds: FloatArray = dataclasses.field(default_factory=_no_weights)
    grouped_modules: tuple[int, ...] = ()
    replicas_per_group: int = 1
    has_image: npt.NDArray[np.bool_] = dataclasses.field(default_factory=_no_images)

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
        arrays = {
            "costs_s": costs_s,
            "sizes": sizes,
            "caps": caps,
            "bin_weights": np.array(self.bin_weights, dtype=np.float64),
            "replica_speeds": np.array(self.replica_speeds, dtype=np.float64),
            "has_image": np.array(self.has_image, dtype=np.bool_),
        }
        for name, value in arrays.items():
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "grouped_modules", tuple(self.grouped_modules))
        object.__setattr__(self, "cap_names", tuple(self.cap_names))
        object.__setattr__(self, "sample_ids", tuple(self.sample_ids))
        checks.check_shapes(self)
        checks.check_costs(self)
        checks.check_caps(self)
        checks.check_bins(self)

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

    @property
    def has_equal_bins(self) -> bool:
        """Whether bins may be exchanged: one weight, one speed, no groups."""
        scale = self.bin_scale
        return not self.grouped_modules and bool((scale == scale[0]).all())

    @functools.cached_property
    def bin_scale(self) -> FloatArray:
        """Load that each bin should have relative to the mean bin: weight times speed, shape (num_bins,)."""
        speeds = self.replica_speeds if self.replica_speeds.size else np.ones(self.num_replicas)
        weights = self.bin_weights if self.bin_weights.size else np.ones(self.num_bins)
        weights = weights / weights.mean()
        scale: FloatArray = weights * np.repeat(speeds, self.num_microbatches)
        return scale

    @functools.cached_property
    def group_of(self) -> IntArray:
        """Group of every bin for the grouped modules, shape (num_bins,).

        Equal microbatches of the replicas that share an encoder replica form a group.
        """
        replica, microbatch = np.divmod(np.arange(self.num_bins), self.num_microbatches)
        group: IntArray = (replica // self.replicas_per_group) * self.num_microbatches + microbatch
        return group

    @functools.cached_property
    def module_scale(self) -> FloatArray:
        """Scale of every bin and module, shape (num_bins, num_modules); a group has the sum of its bins'."""
        scale = np.repeat(self.bin_scale[:, None], self.num_modules, axis=1)
        if self.grouped_modules:
            group_scale = np.bincount(self.group_of, weights=self.bin_scale)[self.group_of]
            scale[:, list(self.grouped_modules)] = group_scale[:, None]
        return scale

    @functools.cached_property
    def limit_sizes(self) -> IntArray:
        """Sizes with one more column of -1 for samples with an image, if every bin needs one."""
        if not self.has_image.size:
            return self.sizes
        return np.hstack([self.sizes, -self.has_image.astype(np.int64)[:, None]])

    @functools.cached_property
    def limit_caps(self) -> IntArray:
        """Caps of `limit_sizes`: "at least one image" is "at most -1 of minus the images"."""
        return np.append(self.caps, -1) if self.has_image.size else self.caps

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
    peaks_s = bin_costs_s(problem, assignment).max(axis=1)
    mean_s = float(peaks_s.mean())
    return float(peaks_s.max()) / mean_s if mean_s > 0 else 1.0
