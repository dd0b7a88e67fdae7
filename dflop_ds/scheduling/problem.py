"""The scheduling problem: samples with predicted costs, bins and hard limits, and what must hold of them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import InfeasibleError, SchedulingError

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
        _check_shapes(self)
        _check_costs(self)
        _check_caps(self)
        _check_bins(self)

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


def _check_shapes(problem: Problem) -> None:
    """Shapes of the arrays, and the counts."""
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
    """Costs are finite and not negative; the sample is named."""
    wrong = ~np.isfinite(problem.costs_s) | (problem.costs_s < 0)
    if wrong.any():
        sample, module = (int(index) for index in np.argwhere(wrong)[0])
        raise SchedulingError(
            f"costs must be finite and not negative, found {problem.costs_s[sample, module]} s for sample "
            f"{problem.sample_name(sample)} in module {module}. Check the cost model's prediction for it."
        )


def _check_caps(problem: Problem) -> None:
    """Sizes and caps are not negative, and every sample fits an empty bin."""
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


def _check_bins(problem: Problem) -> None:
    """What must hold of weights, speeds, groups and images."""
    for name, count in (("bin_weights", problem.num_bins), ("replica_speeds", problem.num_replicas)):
        values = getattr(problem, name)
        if values.size and (values.shape != (count,) or not (np.isfinite(values) & (values > 0)).all()):
            raise SchedulingError(
                f"{name} must be {count} positive, finite numbers, found {values.tolist()}. Correct them."
            )
    wrong = [module for module in problem.grouped_modules if not 0 <= module < problem.num_modules]
    if wrong or problem.replicas_per_group < 1 or problem.num_replicas % problem.replicas_per_group:
        raise SchedulingError(
            f"grouped_modules must be columns of costs_s and replicas_per_group must divide "
            f"{problem.num_replicas} replicas, found {problem.grouped_modules} and "
            f"{problem.replicas_per_group}. Correct the plan."
        )
    if not problem.has_image.size:
        return
    if problem.has_image.shape != (problem.num_samples,):
        raise SchedulingError(
            f"has_image must have one entry for each of {problem.num_samples} samples, found shape "
            f"{problem.has_image.shape}. Correct the shapes."
        )
    num_images = int(problem.has_image.sum())
    if num_images < problem.num_bins:
        raise InfeasibleError(
            f"every one of the {problem.num_bins} bins must hold a sample with an image, found {num_images} "
            f"such samples. Use fewer microbatches or a larger global batch."
        )
