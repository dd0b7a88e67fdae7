"""The search, against simulating everything."""

import dataclasses
import re

import numpy as np
import pytest

from dflop_ds.flops import AudioDims, ModelDims, NativeVisionDims
from dflop_ds.planning.baselines import best_blind, gain_of_balancing
from dflop_ds.planning.candidates import enumerate_layouts
from dflop_ds.planning.evaluation import Evaluator
from dflop_ds.planning.hardware import PRESETS
from dflop_ds.planning.layout import SearchSpace
from dflop_ds.planning.report import comparison_lines, plan_lines, ranking_lines, search_line
from dflop_ds.planning.search import search
from dflop_ds.planning.stages import SPLIT_RULES, StageTable, split_by_rule
from tests.support.planning import DIMS, mixed_table, small_workload


def everything(workload, space, limit_bytes):
    """The fastest of all layouts that fit, each of them simulated; ties by memory."""
    stages = StageTable(workload)
    candidates = enumerate_layouts(stages, space)
    evaluator = Evaluator(stages)
    found = [evaluator.evaluate(candidates.layout(index)) for index in range(len(candidates))]
    fitting = [each for each in found if each.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda each: (each.step_s, each.peak_bytes)), found


@pytest.mark.parametrize("limit_bytes", [80e9, 12e9, 6e9])
def test_no_simulated_layout_is_faster_than_the_proven_one(limit_bytes):
    workload = small_workload(mixed_table(64), 8)
    space = SearchSpace(4, ("uniform", "separate"), 2)
    best, found = everything(workload, space, limit_bytes)
    result = search(workload, space, limit_bytes=limit_bytes, max_simulations=0)
    assert result.proven
    assert result.best.step_s == best.step_s
    assert result.best.peak_bytes == best.peak_bytes
    assert result.num_candidates == len(found)


def test_ties_go_to_less_memory():
    workload = small_workload(mixed_table(64), 8)
    result = search(workload, SearchSpace(1), limit_bytes=80e9, max_simulations=0, num_ranked=100)
    steps = [each.step_s for each in result.ranking]
    assert steps == sorted(steps)
    for first, second in zip(result.ranking[:-1], result.ranking[1:], strict=True):
        assert first.step_s < second.step_s or first.peak_bytes <= second.peak_bytes


def test_an_unproven_search_says_so():
    workload = small_workload(mixed_table(64), 16)
    space = SearchSpace(8, ("uniform", "separate"), 4)
    short = search(workload, space, limit_bytes=80e9, max_simulations=1)
    whole = search(workload, space, limit_bytes=80e9, max_simulations=0)
    assert whole.proven
    assert short.best.step_s >= whole.best.step_s
    assert short.proven == (short.bound_s >= short.best.step_s)


def test_nothing_fits():
    workload = small_workload(mixed_table(64), 8)
    result = search(workload, SearchSpace(2), limit_bytes=1e8)
    assert result.best is None
    assert result.least_bytes > 1e8


def test_splits_by_rule():
    stages = StageTable(small_workload())
    assert split_by_rule(stages, 2, "uniform") == (6, 6)
    sizes = split_by_rule(stages, 2, "parameters")
    counts = [stages.workload.model.memory.parameters[kind] for kind in stages.workload.layers]
    largest = [max(sum(counts[:cut]), sum(counts[cut:])) for cut in range(1, 12)]
    assert max(sum(counts[: sizes[0]]), sum(counts[sizes[0] :])) == min(largest)


@pytest.mark.parametrize("num_stages", range(2, 8))
def test_no_cut_of_deepspeed_is_faster_than_the_plan(num_stages):
    # Few microbatches over slow links: transfers weigh more than the balance of the stages.
    workload = small_workload(mixed_table(64), 2, hardware=PRESETS["cpu"])
    found = search(workload, SearchSpace(num_stages, min_stages=num_stages), limit_bytes=80e9)
    stages = StageTable(workload)
    for rule in SPLIT_RULES:
        other = Evaluator(stages).evaluate(found.best.layout, split_by_rule(stages, num_stages, rule))
        assert found.best.step_s <= other.step_s


def test_baselines_are_data_blind_and_uniform():
    workload = small_workload(mixed_table(64), 16)
    space = SearchSpace(4, min_stages=2)
    found = search(workload, space, limit_bytes=80e9, max_simulations=0, num_ranked=10)
    stages = StageTable(workload)
    blind = best_blind(found, stages, "parameters", 80e9, 1)
    assert blind.sizes == split_by_rule(stages, blind.layout.llm.pipeline, "parameters")
    assert blind.step_s > found.best.step_s
    assert best_blind(found, stages, "parameters", 1.0, 1) is None
    assert 0.0 < gain_of_balancing(found.best, stages) < 1.0


def test_the_report_names_what_was_lost():
    workload = small_workload(mixed_table(64), 16)
    found = search(workload, SearchSpace(4), limit_bytes=80e9, max_simulations=0, num_ranked=6)
    lines = ranking_lines(found, workload, 6)
    legend, *lines = lines
    names = re.findall(r"[a-z]+(?=[0-9])", str(found.best.layout))
    assert {f"{name}:" for name in names if name != "zero"} <= set(legend.split())
    assert len(lines) == 7
    assert str(found.best.layout) in lines[1]
    assert all(("more" in line or "slower" in line or "equally" in line) for line in lines[2:])
    rate = workload.tokens_per_step / found.best.step_s / 4
    assert f"{rate:.0f}" in lines[1]
    assert "no layout of this space can be faster" in search_line(found)
    assert "GB" in plan_lines(found.best, workload, 80e9)[1]
    double = dataclasses.replace(found.best, step_s=2 * found.best.step_s)
    assert "2.00x faster" in comparison_lines(found.best, {"other": double})[0]
    assert "no such layout" in comparison_lines(found.best, {"other": None})[0]


def test_stage_times_are_balanced_by_time_not_by_layers():
    stages = StageTable(small_workload())
    sizes = stages.sizes("all", 2, False)
    times = stages._layer_times_s(False)
    slowest = max(times[: sizes[0]].sum(), times[sizes[0] :].sum())
    assert slowest == pytest.approx(min(max(times[:c].sum(), times[c:].sum()) for c in range(1, 12)))
    totals = stages.workload.layer_totals(np.array([1]), False, np.array([4]))[0]
    assert times.sum() == pytest.approx(totals @ stages.counts("all", 1, False)[0])


@pytest.mark.parametrize(
    "encoder",
    [NativeVisionDims(320, 864, 4, 4, 14, 2, 2, (1, 3)), AudioDims(256, 1024, 4, 3, 128)],
)
def test_encoders_of_other_families_are_planned_too(encoder):
    workload = small_workload(mixed_table(32), 8, dims=ModelDims(encoder, DIMS.llm))
    found = search(workload, SearchSpace(4, ("uniform", "separate"), 4), limit_bytes=80e9)
    assert sum(found.best.sizes) == len(workload.layers)
