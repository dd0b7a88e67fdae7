"""Data-blind assignment: what stock data-parallel DeepSpeed does."""

from __future__ import annotations

import numpy as np

from dflop_ds.scheduling.assignment import Assignment, check_bin_sizes
from dflop_ds.scheduling.problem import Problem


def solve_blind(problem: Problem) -> Assignment:
    """Assign by position only.

    Sample ``i`` of the global batch goes to replica ``i % num_replicas`` (as `DistributedSampler`
    deals them); inside a replica consecutive samples fill the microbatches, the first microbatches
    taking one more when the count does not divide.

    Raises
    ------
    InfeasibleError
        If a bin exceeds a cap; names the bin and the cap.
    """
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    for replica in range(problem.num_replicas):
        positions = np.arange(replica, problem.num_samples, problem.num_replicas)
        for microbatch, chunk in enumerate(np.array_split(positions, problem.num_microbatches)):
            bin_of[chunk] = replica * problem.num_microbatches + microbatch
    check_bin_sizes(problem, bin_of, 'Use the policy "lpt" or "cp_sat", more microbatches, or raise the cap.')
    return Assignment.from_bin_of(bin_of, problem.num_bins)
