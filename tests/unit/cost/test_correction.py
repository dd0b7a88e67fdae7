"""Adaptive correction on emulated runs: measurements are drawn from known truths, plans are real."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from dflop_ds.cost.correction import AdaptiveCorrection, StageSample
from dflop_ds.cost.model import SampleCosts
from dflop_ds.cost.shape_buckets import ShapeBuckets
from dflop_ds.errors import CostModelError
from dflop_ds.scheduling.order import EpochOrder
from dflop_ds.scheduling.planner import StepPlanner
from dflop_ds.shapes import SampleShape, ShapeTable

NUM_STAGES, NUM_REPLICAS, NUM_MICROBATCHES, PER_BIN = 2, 2, 8, 4
TRACKING_COST_S = 2e-3


def make_table(num_samples=640):
    rng = np.random.default_rng(5)
    shapes = []
    for index in range(num_samples):
        kind = rng.integers(3)
        tiles, frames = (int(rng.integers(1, 10)), 0) if kind == 1 else (0, int(16 + rng.integers(16)))
        if kind == 0:
            tiles = frames = 0
        text = int(rng.integers(40, 600))
        shapes.append(SampleShape(str(index), tiles, frames, text, text + 20 * (tiles + frames), text // 2))
    return ShapeTable.from_shapes(shapes)


class Emulation:
    """Plans of a real planner, run by replicas of given slowness on samples of given true times."""

    def __init__(self, slowness=(1.0, 1.0), wrong=None, noise=0.01):
        self.table = make_table()
        encoder_s = 2e-3 * self.table.encoder_inputs + 1e-4
        llm_s = 6e-5 * self.table.llm_tokens
        self.predicted_s = np.column_stack([encoder_s, llm_s])
        self.true_s = self.predicted_s.copy()
        if wrong is not None:
            self.true_s[wrong(self.table)] *= 1.3
        self.slowness = np.array(slowness)
        self.noise, self.rng = noise, np.random.default_rng(11)
        self.buckets = ShapeBuckets(self.table)
        self.correction = AdaptiveCorrection(NUM_STAGES, NUM_REPLICAS, ShapeBuckets.num_buckets)
        self.planner = StepPlanner(
            table=self.table,
            rows=np.arange(len(self.table)),
            order=EpochOrder(len(self.table), NUM_REPLICAS * NUM_MICROBATCHES * PER_BIN, seed=0),
            num_replicas=NUM_REPLICAS,
            num_microbatches=NUM_MICROBATCHES,
            micro_batch_size=PER_BIN,
            costs=None,
            policy="lpt",
        )

    def step(self, number, cost_s=TRACKING_COST_S):
        """Plan, run and learn; the longest over the mean time of a replica in the step, and the error."""
        factors = self.correction.sample_factors(self.buckets)
        costs = SampleCosts(self.predicted_s * factors / 3, self.predicted_s * factors * 2 / 3)
        speeds = tuple(1.0 / self.correction.replica_slowness())
        plan = dataclasses.replace(self.planner, costs=costs, replica_speeds=speeds).plan(number).plan
        samples = []
        for replica in range(NUM_REPLICAS):
            for members in plan.replica_bins(replica):
                split = self.buckets.split(members, self.predicted_s)
                true_s = self.true_s[list(members)].sum(axis=0) * self.slowness[replica]
                for stage in range(NUM_STAGES):
                    seconds = true_s[stage] * (1 + self.noise * self.rng.standard_normal())
                    samples.append(StageSample(replica, stage, tuple(split[:, stage]), float(seconds)))
        error = self.error(samples)
        loads = [sum(s.measured_s for s in samples if s.replica == r) for r in range(NUM_REPLICAS)]
        if self.correction.wants(number):
            self.correction.observe(samples, cost_s)
        return max(loads) / np.mean(loads), error

    def error(self, samples):
        corrected = np.array([self.correction.corrected_s(sample) for sample in samples])
        measured = np.array([sample.measured_s for sample in samples])
        scale = np.median(measured / corrected)
        return float(np.mean(np.abs(scale * corrected / measured - 1)))


def clips(table):
    return table.num_frames > 0


def test_a_slow_rank_and_a_wrong_shape_class_are_corrected_within_10_steps():
    run = Emulation(slowness=(1.0, 1.5), wrong=clips)
    outcomes = [run.step(number) for number in range(10)]
    assert outcomes[0][0] > 1.15, "the slow replica holds the step up"
    assert outcomes[0][1] > 0.10
    for imbalance, error in outcomes[-3:]:
        assert imbalance < 1.03, "the slow replica has lighter bins"
        assert error < 0.04
    relative = run.correction.replica_slowness()
    assert relative[1] / relative[0] == pytest.approx(1.5, rel=0.03)
    factors = run.correction.sample_factors(run.buckets)
    of_clips = factors[clips(run.table)].mean(axis=0)
    of_text = factors[run.table.encoder_inputs == 0].mean(axis=0)
    assert of_clips[1] / of_text[1] == pytest.approx(1.3, rel=0.05)
    assert run.correction.tracking


def test_tracking_turns_off_when_nothing_is_wrong():
    run = Emulation(noise=0.02)
    for number in range(10):
        run.step(number)
    assert not run.correction.tracking
    assert (run.correction.sample_factors(run.buckets) == 1).all()
    assert (run.correction.replica_slowness() == 1).all()


def test_drift_turns_tracking_on_again_with_one_warning(caplog):
    run = Emulation()
    for number in range(12):
        run.step(number)
    assert not run.correction.tracking
    run.slowness = np.array([1.0, 1.4])  # throttled
    with caplog.at_level(logging.WARNING):
        for number in range(12, 28):
            imbalance, _ = run.step(number)
    assert run.correction.tracking
    assert imbalance < 1.05, "1.17 with equal bins"
    assert len([r for r in caplog.records if "tracked again" in r.getMessage()]) == 1


def test_most_steps_are_not_gathered_while_off():
    run = Emulation()
    for number in range(12):
        run.step(number)
    assert sum(run.correction.wants(number) for number in range(100)) == 25


def test_tracking_that_costs_more_than_it_gains_is_off():
    run = Emulation(slowness=(1.0, 1.5))
    for number in range(9):
        run.step(number, cost_s=1e6)
    assert not run.correction.tracking


def test_the_same_measurements_give_the_same_state():
    states = []
    for _ in range(2):
        run = Emulation(slowness=(1.2, 1.0), wrong=clips)
        for number in range(6):
            run.step(number)
        states.append(json.dumps(run.correction.state_dict()))
    assert states[0] == states[1]


def test_memory_is_bounded():
    run = Emulation(slowness=(1.0, 1.5))
    for number in range(60):
        run.step(number)
    assert len(run.correction.state_dict()["samples"]) == NUM_STAGES * NUM_REPLICAS * 192


def test_saved_and_restored():
    run = Emulation(slowness=(1.0, 1.5), wrong=clips)
    for number in range(5):
        run.step(number)
    state = json.loads(json.dumps(run.correction.state_dict()))
    other = AdaptiveCorrection(NUM_STAGES, NUM_REPLICAS, ShapeBuckets.num_buckets)
    other.load_state_dict(state)
    assert other.state_dict() == run.correction.state_dict()
    sample = StageSample(0, 1, (0.1,) * 6, 0.7)
    other.observe([sample], 0.0)
    run.correction.observe([sample], 0.0)
    assert other.state_dict() == run.correction.state_dict()


def test_the_state_of_another_layout_is_not_used(caplog):
    small = AdaptiveCorrection(1, 1, 6)
    small.load_state_dict(AdaptiveCorrection(2, 2, 6).state_dict())
    assert small.slowness.shape == (1, 1)
    assert "not used" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.update(schema_version=9), "Upgrade dflop_ds"),
        (lambda state: state.pop("factors"), "factors"),
        (lambda state: state.update(factors=[[float("nan")] * 6] * 2), "finite and positive"),
        (lambda state: state.update(slowness=[[1.0, 0.0]] * 2), "found 0.0 to 1.0"),
    ],
)
def test_damaged_state(damage, message):
    correction = AdaptiveCorrection(2, 2, 6)
    state = correction.state_dict()
    damage(state)
    with pytest.raises(CostModelError, match=message):
        correction.load_state_dict(state)


@pytest.mark.parametrize(
    "sample",
    [
        StageSample(0, 0, (0.1,) * 6, float("nan")),
        StageSample(0, 0, (0.1,) * 6, -1.0),
        StageSample(0, 0, (0.1,) * 5, 1.0),
        StageSample(7, 0, (0.1,) * 6, 1.0),
    ],
)
def test_bad_measurements(sample):
    with pytest.raises(CostModelError, match="must be of a known rank"):
        AdaptiveCorrection(2, 2, 6).observe([sample], 0.0)


def test_a_single_stage_and_replica_corrects_buckets_only():
    run = AdaptiveCorrection(1, 1, 2)
    rng = np.random.default_rng(0)
    for _ in range(10):
        parts = rng.uniform(0.1, 1.0, size=(8, 2))
        run.observe([StageSample(0, 0, (a, b), float(2 * (a + 1.3 * b))) for a, b in parts], 0.0)
    assert run.factors[0, 1] / run.factors[0, 0] == pytest.approx(1.3, rel=0.05)
    assert run.replica_slowness() == pytest.approx([1.0])
