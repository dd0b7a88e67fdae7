"""Other ways to put samples into bins, for comparison: bin of every sample from its costs and lengths."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model
from transformers.trainer_pt_utils import BatchRebalanceSampler

from dflop_ds.scheduling.problem import Problem

IntArray = npt.NDArray[np.int64]

MAX_BOOLEANS = 200_000


def random_bins(problem: Problem, seed: int) -> IntArray:
    """Equal counts, at random."""
    return np.random.default_rng(seed).permutation(np.arange(problem.num_samples) % problem.num_bins)


def group_by_length(problem: Problem, lengths: npt.NDArray[np.float64]) -> IntArray:
    """Equal counts, samples of similar length together, as length-grouped samplers do."""
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    for index, members in enumerate(np.array_split(np.argsort(-lengths, kind="stable"), problem.num_bins)):
        bin_of[members] = index
    return bin_of


def textbook_lpt(problem: Problem) -> IntArray:
    """Longest first into the least loaded bin, by the module with most work."""
    total_s, bin_of = _heavier_module_s(problem), np.empty(problem.num_samples, dtype=np.int64)
    heap = [(0.0, index) for index in range(problem.num_bins)]
    for sample in np.argsort(-total_s, kind="stable"):
        load_s, index = heapq.heappop(heap)
        bin_of[sample] = index
        heapq.heappush(heap, (load_s + float(total_s[sample]), index))
    return bin_of


def karmarkar_karp(problem: Problem) -> IntArray:
    """Multi-way differencing of the module with most work.

    The two partial partitions that differ most are joined, large bins with small.
    """
    total_s, num_bins = _heavier_module_s(problem), problem.num_bins
    order = itertools.count()
    heap = []
    for sample, cost_s in enumerate(total_s.tolist()):
        loads_s, members = np.zeros(num_bins), [[] for _ in range(num_bins - 1)] + [[sample]]
        loads_s[-1] = cost_s
        heap.append((-cost_s, next(order), loads_s, members))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, a_s, first), (_, _, b_s, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined_s = a_s + b_s[::-1]
        joined = [ours + theirs for ours, theirs in zip(first, reversed(second), strict=True)]
        rank = np.argsort(joined_s, kind="stable")
        joined_s = joined_s[rank] - joined_s[rank[0]]
        heapq.heappush(heap, (-float(joined_s[-1]), next(order), joined_s, [joined[place] for place in rank]))
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    for index, members in enumerate(heap[0][3]):
        bin_of[members] = index
    return bin_of


def textbook_cp_sat(problem: Problem, time_limit_s: float) -> IntArray | None:
    """One Boolean for every sample and bin, least largest bin; None if nothing was found."""
    if problem.num_samples * problem.num_bins > MAX_BOOLEANS:
        return None
    costs = np.rint(problem.costs_s / problem.costs_s.sum() * 2**30).astype(np.int64)
    model = cp_model.CpModel()
    places = [[model.new_bool_var("") for _ in range(problem.num_bins)] for _ in range(problem.num_samples)]
    peak = model.new_int_var(0, 2**30, "peak")
    for row in places:
        model.add_exactly_one(row)
    for index, module in itertools.product(range(problem.num_bins), range(problem.num_modules)):
        column = [row[index] for row in places]
        model.add(cp_model.LinearExpr.weighted_sum(column, costs[:, module].tolist()) <= peak)
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return np.array([next(b for b, place in enumerate(row) if solver.boolean_value(place)) for row in places])


def batch_rebalance(problem: Problem, lengths: npt.NDArray[np.float64]) -> IntArray:
    """The groups of the Trainer's `BatchRebalanceSampler`, which knows text lengths only."""
    bin_of = np.empty(problem.num_samples, dtype=np.int64)
    for rank in range(problem.num_replicas):
        sampler = BatchRebalanceSampler(
            lengths.astype(int).tolist(),
            effective_batch_size=problem.num_samples,
            dp_size=problem.num_replicas,
            grad_accum=problem.num_microbatches,
            shuffle=False,
            rank=rank,
        )
        for microbatch, members in enumerate(sampler):
            bin_of[members] = rank * problem.num_microbatches + microbatch
    return bin_of


def _heavier_module_s(problem: Problem) -> npt.NDArray[np.float64]:
    """Costs in the module with most work in total, for methods that know one number per sample."""
    return problem.costs_s[:, problem.costs_s.sum(axis=0).argmax()]
