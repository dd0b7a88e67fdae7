"""Local search on an assignment: single moves and swaps between two bins."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from dflop_ds.scheduling.assignment import scaled_loads_s
from dflop_ds.scheduling.problem import FloatArray, IntArray, Problem

_MAX_MEMBERS = 32
_MAX_PARTNERS = 1024
_RELATIVE_GAIN = 1e-9


@dataclasses.dataclass
class BinLoads:
    """Mutable assignment with its loads.

    Attributes
    ----------
    problem : Problem
    bin_of : ndarray of int64, shape (num_samples,)
    loads_s : ndarray of float64, shape (num_bins, num_modules)
        Relative to what each bin should have, see `scaled_loads_s`.
    used : ndarray of int64, shape (num_bins, num_limits)
    counts : ndarray of int64, shape (num_bins,)
        Samples of each bin.
    by_cost : ndarray of int64, shape (num_samples,)
        Sample positions by decreasing largest module cost.
    """

    problem: Problem
    bin_of: IntArray
    loads_s: FloatArray = dataclasses.field(init=False)
    used: IntArray = dataclasses.field(init=False)
    counts: IntArray = dataclasses.field(init=False)
    by_cost: IntArray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.bin_of = self.bin_of.copy()
        self.by_cost = np.argsort(-self.problem.costs_s.max(axis=1), kind="stable")
        self.loads_s = scaled_loads_s(self.problem, self.bin_of)
        self.used = np.zeros((self.problem.num_bins, len(self.problem.limit_caps)), dtype=np.int64)
        np.add.at(self.used, self.bin_of, self.problem.limit_sizes)
        self.counts = np.bincount(self.bin_of, minlength=self.problem.num_bins)

    def reassign(self, samples: IntArray, bins: IntArray) -> None:
        """Put `samples` into `bins` and recompute the loads of the bins that change."""
        problem = self.problem
        touched = np.unique(np.concatenate([self.bin_of[samples], bins]))
        self.bin_of[samples] = bins
        for index in touched:
            members = self.bin_of == index
            self.loads_s[index] = problem.costs_s[members].sum(axis=0) / problem.module_scale[index]
            self.used[index] = problem.limit_sizes[members].sum(axis=0)
            self.counts[index] = members.sum()
        if problem.grouped_modules:
            self.loads_s = scaled_loads_s(problem, self.bin_of)


@dataclasses.dataclass
class _Exchanges:
    """Every exchange between one bin and the others, arrays of shape (num_members, num_partners).

    Partner ``p < len(others)`` is a sample to swap with; further partners stand for a plain move
    into a bin.
    """

    members: IntArray
    partners: IntArray
    partner_bins: IntArray
    peak_s: FloatArray
    squares_delta: FloatArray


def _thin(samples: IntArray, limit: int) -> IntArray:
    """At most `limit` of the samples, which are in order of cost, spread evenly."""
    if len(samples) <= limit:
        return samples
    return samples[np.linspace(0, len(samples) - 1, limit).astype(np.int64)]


def _exchanges(state: BinLoads, source: int) -> _Exchanges:
    problem = state.problem
    is_member = state.bin_of[state.by_cost] == source
    members = _thin(state.by_cost[is_member], _MAX_MEMBERS)
    others = _thin(state.by_cost[~is_member], _MAX_PARTNERS)
    targets = np.delete(np.arange(problem.num_bins), source)
    partner_bins = np.concatenate([state.bin_of[others], targets])
    back_s = np.vstack([problem.costs_s[others], np.zeros((len(targets), problem.num_modules))])
    shape = (len(members), len(partner_bins))
    peak_s, squares = np.zeros(shape), np.zeros(shape)
    for module in range(problem.num_modules):
        loads_s, scale = state.loads_s[:, module], problem.module_scale[:, module]
        delta_s = back_s[:, module] - problem.costs_s[members, module][:, None]
        if module in problem.grouped_modules:
            delta_s[:, problem.group_of[partner_bins] == problem.group_of[source]] = 0.0
        ours_s, theirs_s = delta_s / scale[source], delta_s / scale[partner_bins]
        np.maximum(peak_s, loads_s[source] + ours_s, out=peak_s)
        np.maximum(peak_s, loads_s[partner_bins] - theirs_s, out=peak_s)
        squares += ours_s * (2.0 * loads_s[source] + ours_s)
        squares -= theirs_s * (2.0 * loads_s[partner_bins] - theirs_s)
    if len(problem.limit_caps):
        sizes = problem.limit_sizes
        back = np.vstack([sizes[others], np.zeros((len(targets), sizes.shape[1]), dtype=np.int64)])
        delta = back[None, :, :] - sizes[members][:, None, :]
        fits = (state.used[source] + delta <= problem.limit_caps) & (
            state.used[partner_bins] - delta <= problem.limit_caps
        )
        peak_s[~fits.all(axis=2)] = np.inf
    if state.counts[source] == 1:
        peak_s[:, len(others) :] = np.inf
    return _Exchanges(members, others, partner_bins, peak_s, squares)


def _apply(state: BinLoads, source: int, exchanges: _Exchanges, flat: int) -> None:
    member, partner = divmod(flat, exchanges.peak_s.shape[1])
    samples, bins = [exchanges.members[member]], [exchanges.partner_bins[partner]]
    if partner < len(exchanges.partners):
        samples.append(exchanges.partners[partner])
        bins.append(np.int64(source))
    state.reassign(np.array(samples), np.array(bins))


def _lower_peak(state: BinLoads) -> bool:
    """Lower the fullest bin by the best exchange; False if none lowers it."""
    peaks_s = state.loads_s.max(axis=1)
    source = int(peaks_s.argmax())
    exchanges = _exchanges(state, source)
    best_s = exchanges.peak_s.min(initial=np.inf)
    if best_s >= peaks_s[source] * (1.0 - _RELATIVE_GAIN):
        return False
    ties = np.flatnonzero(exchanges.peak_s == best_s)
    _apply(state, source, exchanges, int(ties[exchanges.squares_delta.flat[ties].argmin()]))
    return True


def _lower_squares(state: BinLoads, source: int) -> bool:
    """Spread the loads of one bin more evenly without raising the largest; False if nothing does."""
    limit_s = state.loads_s.max()
    exchanges = _exchanges(state, source)
    delta = np.where(exchanges.peak_s <= limit_s, exchanges.squares_delta, np.inf)
    if delta.min(initial=np.inf) >= -_RELATIVE_GAIN * limit_s**2:
        return False
    _apply(state, source, exchanges, int(delta.argmin()))
    return True


def descend(state: BinLoads, max_rounds: int, *, end_s: float = np.inf) -> None:
    """Improve `state` in place by moves and swaps.

    First the largest load is lowered; when no exchange with the fullest bin lowers it, the sum of
    squared loads is, so that the cheaper modules are balanced as well. The largest load never grows,
    and a bin that holds samples is never emptied.

    Parameters
    ----------
    state : BinLoads
        Changed in place.
    max_rounds : int
        Most neighbourhoods to search, of one bin with all others; half of them may go to the largest load.
    end_s : float
        Time on `time.perf_counter` after which no further one is searched.
    """
    if state.problem.num_samples == 0 or state.problem.num_bins == 1:
        return
    rounds = 0
    while rounds < (max_rounds + 1) // 2 and time.perf_counter() < end_s and _lower_peak(state):
        rounds += 1
    settled = np.zeros(state.problem.num_bins, dtype=np.bool_)
    while rounds < max_rounds and time.perf_counter() < end_s and not settled.all():
        module = rounds % state.problem.num_modules
        source = int(np.where(settled, -1.0, state.loads_s[:, module]).argmax())
        settled[source] = not _lower_squares(state, source)
        rounds += 1
