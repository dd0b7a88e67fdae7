"""Measured costs: factors for backward passes, outliers, giving up where nothing can be learned."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from benchmarks.hf_data import build_model, tiny_llava
from dflop_ds.cost.microbatch_cost import MicrobatchSizes
from dflop_ds.integrations.hf_calibration import Calibration, ForwardTimer, backward_factors


def draw_step(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.uniform(100, 900, (2, 2))
    return MicrobatchSizes(tokens, tokens**2, rng.integers(0, 9, (2, 2)).astype(float))


def make(num_steps=3):
    return Calibration(num_steps, waits_for_slowest=False, llm_factor=3.0, encoder_factor=1.0)


def test_costs_come_after_the_warm_up_and_include_backward():
    calibration, found = make(), []
    for seed in range(4):
        sizes = draw_step(seed)
        found.append(calibration.add(sizes, 1e-3 + 2e-5 * sizes.tokens + 4e-3 * sizes.encoder_inputs))
    assert found[:3] == [None] * 3
    assert found[3].token_s == pytest.approx(6e-5)
    assert found[3].encoder_input_s == pytest.approx(4e-3)
    assert found[3].overhead_s == pytest.approx(3e-3)


def test_equal_microbatches_end_in_a_warning(caplog):
    calibration = make(num_steps=2)
    same = MicrobatchSizes(*(np.full((2, 2), 5.0) for _ in range(3)))
    with caplog.at_level(logging.WARNING, logger="dflop_ds"):
        results = [calibration.add(same, np.ones((2, 2))) for _ in range(20) if not calibration.has_given_up]
    assert results == [None] * 9  # one is not measured, then 2, 4, 6 and 8 in all
    assert calibration.has_given_up and "data-blind order stays" in caplog.text


def test_passes_that_are_never_seen_end_in_a_warning(caplog):
    calibration = make(num_steps=2)
    with caplog.at_level(logging.WARNING, logger="dflop_ds"):
        for seed in range(9):
            assert not calibration.has_given_up
            calibration.add(draw_step(seed), np.zeros((2, 2)))
    assert calibration.has_given_up and "forward passes of the model were not seen" in caplog.text


def test_steps_without_times_do_not_count():
    calibration = make()
    for seed in range(9):
        assert calibration.add(draw_step(seed), np.full((2, 2), np.nan)) is None


def test_frozen_modules_have_cheaper_backward_passes():
    model = build_model(tiny_llava())
    assert backward_factors(model) == (3.0, 3.0)
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    assert backward_factors(model) == (3.0, 1.0)
    model.model.language_model.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    assert backward_factors(model)[0] == 2.0


def test_timer_counts_training_passes_only_and_comes_off():
    model = torch.nn.Linear(2, 2)
    timer = ForwardTimer(model)
    model(torch.zeros(1, 2)), model(torch.zeros(1, 2))
    assert len(timer.take()) == 2 and timer.take() == []
    model.eval()(torch.zeros(1, 2))
    assert timer.take() == []
    timer.remove()
    model.train()(torch.zeros(1, 2))
    assert timer.take() == []
