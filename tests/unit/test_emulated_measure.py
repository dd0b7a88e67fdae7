"""The emulated-cluster benchmark without its ranks: times of the emulated model, and the calibration."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import emulated_times
from benchmarks.emulated_measure import Layout, Measured, Overheads, calibrate, simulate
from benchmarks.emulated_times import EmulatedModel
from dflop_ds.cost.features import MicrobatchFeatures


def test_times_are_scaled_and_add_up() -> None:
    table = emulated_times.mixed_shapes(256, seed=0)
    model = EmulatedModel.scaled(table, samples_per_bin=4, num_stages=4, pass_s=0.02)
    assert model.layer_s.sum() / len(table) * 4 / 4 == pytest.approx(0.02)
    bins = np.arange(256).reshape(-1, 4).tolist()
    forward_s, backward_s = model.bin_times_s(bins, model.boundaries(4))
    assert forward_s.sum() == pytest.approx(model.layer_s.sum())
    np.testing.assert_allclose(backward_s, 2 * forward_s)
    # The cost model predicts for a whole microbatch what its samples wait for one by one.
    features = MicrobatchFeatures.from_bins(table, bins)
    predicted_s = sum(model.times.predict(kind, features)[0] for kind in emulated_times.LAYERS)
    np.testing.assert_allclose(predicted_s, forward_s.sum(axis=1))


def test_calibration_finds_the_overheads_that_were_added() -> None:
    rng = np.random.default_rng(0)
    forward_s, backward_s = rng.uniform(0.01, 0.05, (2, 5, 2, 4, 8))
    true = Overheads(forward_s=0.001, backward_s=0.002, transfer_s=0.0015, step_s=0.02)
    run = Measured("", np.zeros(5), np.zeros(5), forward_s, backward_s, (0.001, 0.002), np.zeros(5))
    result = simulate(run, true)
    run = dataclasses.replace(run, step_s=result.step_time_s, makespan_s=result.makespan_s)
    found = calibrate(run)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(true), rel=1e-3)


def test_layouts_share_the_global_batch() -> None:
    layout = Layout.parse("2x4", batch_size=64, micro_batch_size=2)
    assert layout == Layout(num_stages=2, num_replicas=4, num_microbatches=8)
    assert layout.name == "2x4"
