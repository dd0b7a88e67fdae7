"""LPT in sections of bins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflop_ds.scheduling.lpt import solve_lpt
from dflop_ds.scheduling.problem import Problem
from dflop_ds.scheduling.sections import place_in_sections


def costs(num_samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, 1.0, (num_samples, 2))


def costliest_first(problem: Problem) -> np.ndarray:
    return np.lexsort((-problem.costs_s.sum(axis=1), -problem.costs_s.max(axis=1)))


def plain_lpt(problem: Problem) -> list[int]:
    """Every sample into the bin with the least peak, then sum, then number of samples, then index."""
    costs_s, scale = problem.costs_s.tolist(), problem.bin_scale.tolist()
    bins = range(problem.num_bins)
    loads_s, counts = [(0.0, 0.0) for _ in bins], [0 for _ in bins]
    bin_of = [-1] * problem.num_samples
    for place, sample in enumerate(costliest_first(problem).tolist()):
        must_fill = problem.num_samples - place == counts.count(0)
        best: tuple[float, float, int, int] | None = None
        for index in bins:
            if must_fill and counts[index]:
                continue
            (first, second), size = loads_s[index], scale[index]
            peak_s = max(first + costs_s[sample][0] / size, second + costs_s[sample][1] / size)
            key = (peak_s, first + second, counts[index], index)
            best = key if best is None else min(best, key)
        assert best is not None
        target = best[-1]
        added = zip(loads_s[target], costs_s[sample], strict=True)
        loads_s[target] = tuple(load + cost / scale[target] for load, cost in added)
        counts[target] += 1
        bin_of[sample] = target
    return bin_of


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("num_samples", [1024, 517])
def test_each_section_is_plain_lpt_of_its_samples(num_samples: int, ramp: bool) -> None:
    weights = np.tile(np.linspace(0.5, 1.0, 8), 64) if ramp else np.zeros(0)
    problem = Problem(costs(num_samples), 64, 8, bin_weights=weights)
    order = costliest_first(problem)
    bin_of = place_in_sections(problem, order)
    assert bin_of is not None
    size = 512 // 4
    for section in range(4):
        # Dealt back and forth: 0 1 2 3, 3 2 1 0, ...
        dealt = [
            sample
            for place, sample in enumerate(order)
            if (place % 4 if place // 4 % 2 == 0 else 3 - place % 4) == section
        ]
        own = Problem(
            problem.costs_s[dealt],
            16,
            8,
            bin_weights=weights[:size] if ramp else weights,
        )
        np.testing.assert_array_equal(bin_of[dealt], section * size + np.array(plain_lpt(own)))


def test_no_bin_stays_empty_and_no_cap_is_broken() -> None:
    seconds = costs(600)
    sizes = np.random.default_rng(1).integers(1, 100, (600, 1))
    problem = Problem(seconds, 64, 8, sizes=sizes, caps=np.array([150]), cap_names=("tokens",))
    bin_of = place_in_sections(problem, costliest_first(problem))
    assert bin_of is not None
    assert np.bincount(bin_of, minlength=512).min() == 1
    assert np.bincount(bin_of, weights=sizes[:, 0]).max() <= 150


def test_what_binds_several_sections_is_left_to_plain_lpt() -> None:
    problem = Problem(costs(1024), 64, 8)
    order = costliest_first(problem)
    speeds = np.linspace(0.5, 1.0, 64)
    for change in (
        {"has_image": np.ones(1024, dtype=np.bool_)},
        {"grouped_modules": (0,), "replicas_per_group": 2},
        {"replica_speeds": speeds},  # no two replicas alike
    ):
        assert place_in_sections(dataclasses.replace(problem, **change), order) is None
    assert place_in_sections(Problem(costs(1024), 32, 8), order) is None  # 256 bins
    full = Problem(
        np.ones((1024, 1)),
        64,
        8,
        sizes=np.full((1024, 1), 2),
        caps=np.array([3]),
        cap_names=("tokens",),
    )
    assert place_in_sections(full, order) is None


def test_hundreds_of_bins_are_even() -> None:
    problem = Problem(costs(8192, seed=2), 64, 8)
    bin_of = solve_lpt(problem).bin_of()
    loads_s = np.stack([np.bincount(bin_of, weights=column) for column in problem.costs_s.T])
    assert loads_s.max() <= 1.01 * max(loads_s.mean(axis=1).max(), problem.costs_s.max())
