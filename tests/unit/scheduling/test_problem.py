import numpy as np
import pytest

from dflop_ds.errors import InfeasibleError, SchedulingError
from dflop_ds.scheduling.assignment import Assignment, bin_loads_s, imbalance
from dflop_ds.scheduling.bound import lower_bound_s
from dflop_ds.scheduling.problem import Problem


def _problem(costs_s, num_replicas=1, num_microbatches=2, **options):
    return Problem(np.asarray(costs_s, dtype=float), num_replicas, num_microbatches, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e-9])
def test_a_bad_cost_is_refused_by_sample_id_and_module(value):
    costs_s = np.ones((3, 2))
    costs_s[1, 1] = value
    with pytest.raises(SchedulingError, match=r"'cat' in module 1"):
        Problem(costs_s, 1, 2, sample_ids=("ant", "cat", "dog"))
    with pytest.raises(SchedulingError, match="at position 1 in module 1"):
        Problem(costs_s, 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, found 0"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, found 0"),
        (
            {"sizes": np.ones((2, 1), int), "caps": np.array([5]), "cap_names": ("t",)},
            r"\(3, 1\), found \(2, 1\)",
        ),
        ({"sizes": np.ones((3, 1), int), "caps": np.array([5])}, "cap_names must name each of the 1 caps"),
        ({"sizes": np.ones((3, 1)), "caps": np.array([5]), "cap_names": ("t",)}, "sizes must hold integers"),
        (
            {"sizes": -np.ones((3, 1), int), "caps": np.array([5]), "cap_names": ("t",)},
            "must not be negative",
        ),
        ({"sizes": np.ones((3, 1), int), "caps": np.array([[5]]), "cap_names": ("t",)}, "one dimension"),
        ({"sample_ids": ("a",)}, "each of the 3 samples, found 1 names"),
    ],
)
def test_mismatches_are_refused(options, message):
    with pytest.raises(SchedulingError, match=message):
        _problem(np.ones((3, 1)), **options)


@pytest.mark.parametrize("costs_s", [np.ones(3), np.ones((3, 0)), np.ones((3, 1, 1))])
def test_costs_need_two_dimensions(costs_s):
    with pytest.raises(SchedulingError, match="costs_s must have shape"):
        _problem(costs_s)


def test_a_sample_above_a_cap_is_named():
    with pytest.raises(InfeasibleError, match=r"'big' needs 9 of tokens, the cap is 8"):
        _problem(
            np.ones((2, 1)),
            sizes=np.array([[1], [9]]),
            caps=np.array([8]),
            cap_names=("tokens",),
            sample_ids=("small", "big"),
        )


def test_arrays_are_copied_and_read_only():
    costs_s = np.ones((2, 1))
    problem = _problem(costs_s)
    costs_s[0, 0] = 7.0
    assert problem.costs_s[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        problem.costs_s[0, 0] = 2.0


def test_bin_index_is_replica_major():
    problem = _problem(np.ones((6, 1)), num_replicas=2, num_microbatches=3)
    assert problem.num_bins == 6
    assert problem.bin_name(4) == "bin 4 (replica 1, microbatch 1)"


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        (((0, 1, 2),), "must have 2 bins, found 1"),
        (((1, 0), (2,)), "ascending inside a bin"),
        (((0, 1), (1, 2)), "found 4 places for 3 of them"),
        (((0, 1), ()), "found 2 places for 2 of them"),
        (((0, 1), (3,)), "found 3 places for 2 of them"),
    ],
)
def test_validate_finds_what_is_not_a_partition(bins, message):
    with pytest.raises(SchedulingError, match=message):
        Assignment(bins).validate(_problem(np.ones((3, 1))))


def test_validate_names_the_bin_and_the_cap():
    problem = _problem(np.ones((3, 1)), sizes=np.full((3, 1), 4), caps=np.array([8]), cap_names=("tiles",))
    Assignment(((0, 1), (2,))).validate(problem)
    with pytest.raises(
        InfeasibleError, match=r"bin 1 \(replica 0, microbatch 1\) holds 12 of tiles, the cap is 8"
    ):
        Assignment(((), (0, 1, 2))).validate(problem)


def test_bin_costs_and_imbalance_by_hand():
    problem = _problem([[1, 4], [2, 1], [3, 0]])
    assignment = Assignment(((0, 2), (1,)))
    np.testing.assert_array_equal(bin_loads_s(problem, assignment), [[4, 4], [2, 1]])
    assert imbalance(problem, assignment) == pytest.approx(4 / 3)
    assert imbalance(_problem(np.zeros((2, 1))), Assignment(((0,), (1,)))) == 1.0


@pytest.mark.parametrize(
    ("costs_s", "expected_s"),
    [
        ([[3], [3], [2], [2], [2]], 6.0),  # mean: 12 / 2; the pair bound is 4
        ([[9], [1], [1]], 9.0),  # largest sample
        ([[5], [5], [5]], 10.0),  # two of three share a bin
        ([[5], [5], [5], [5], [5]], 15.0),  # three of five share a bin
        ([[1, 0], [0, 8], [1, 0]], 8.0),  # another module
        (np.zeros((0, 2)), 0.0),
        (np.zeros((4, 2)), 0.0),
    ],
)
def test_lower_bound_by_hand(costs_s, expected_s):
    assert lower_bound_s(_problem(costs_s)) == pytest.approx(expected_s)
