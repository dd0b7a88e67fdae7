"""The searches that the planner is compared with."""

from benchmarks.planner_reference import (
    Splits,
    _mean_bytes,
    exhaustive_best,
    pairs_of_degrees,
    reference_rule,
)
from dflop_ds.planning.candidates import enumerate_layouts
from dflop_ds.planning.layout import Degrees, Layout, SearchSpace
from dflop_ds.planning.search import search
from dflop_ds.planning.stages import StageTable
from tests.support.planning import mixed_table, small_workload


def test_both_searches_look_at_the_same_layouts():
    workload = small_workload(mixed_table(32), 8)
    candidates = enumerate_layouts(StageTable(workload), SearchSpace(4, ("separate",), 8))
    found = {(layout.encoder, layout.llm) for layout in map(candidates.layout, range(len(candidates)))}
    assert found == set(pairs_of_degrees(workload, 4, 8))


def test_all_splits_tried_agree_with_the_exact_split():
    workload = small_workload(mixed_table(32), 8)
    splits, stages = Splits(workload), StageTable(workload)
    for depth in (1, 2, 3, 5):
        layout = Layout(None, Degrees(1, depth, 1), 4, False, 0)
        assert splits.of(layout) == stages.layout_sizes(layout)


def test_regret_is_zero():
    workload = small_workload(mixed_table(32), 4)
    best, num_simulated = exhaustive_best(workload, 2, 2, 80e9)
    found = search(workload, SearchSpace(2, ("uniform", "separate"), 2), limit_bytes=80e9, max_simulations=0)
    assert found.best.step_s == best.step_s
    assert found.num_candidates == num_simulated


def test_the_rule_takes_the_first_count_that_fits():
    workload = small_workload(mixed_table(32), 8, reduce_bucket_values=0)
    roomy = reference_rule(workload, 2, 1, 1e12, generous=False)
    assert roomy == Layout(Degrees(1, 1, 1), Degrees(1, 1, 1), 1, True, 0)
    # A little less than what one microbatch needs, which two then need not.
    limit_bytes = 0.999 * _mean_bytes(StageTable(workload), roomy)
    assert reference_rule(workload, 2, 1, limit_bytes, generous=False).num_microbatches == 2
    assert reference_rule(workload, 2, 1, 1e6, generous=True) is None
