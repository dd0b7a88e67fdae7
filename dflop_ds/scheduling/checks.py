"""What must hold of a scheduling problem before it is solved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dflop_ds.errors import InfeasibleError, SchedulingError

if TYPE_CHECKING:
    from dflop_ds.scheduling.problem import Problem


def check_shapes(problem: Problem) -> None:
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


def check_costs(problem: Problem) -> None:
    """Costs are finite and not negative; the sample is named."""
    wrong = ~np.isfinite(problem.costs_s) | (problem.costs_s < 0)
    if wrong.any():
        sample, module = (int(index) for index in np.argwhere(wrong)[0])
        raise SchedulingError(
            f"costs must be finite and not negative, found {problem.costs_s[sample, module]} s for sample "
            f"{problem.sample_name(sample)} in module {module}. Check the cost model's prediction for it."
        )


def check_caps(problem: Problem) -> None:
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


def check_bins(problem: Problem) -> None:
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
