"""Sizes of Trainer samples: what shape functions may return, and what is read from samples."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from benchmarks.hf_data import PaddedCollator, Sample, SyntheticSamples, tiny_llava
from dflop_ds.errors import DataError
from dflop_ds.integrations.hf_shapes import as_shape, measured_shape, preserved_rng
from dflop_ds.shapes import SampleShape


def test_what_a_shape_function_may_return():
    whole = SampleShape("a", 1, 2, 3, 4, 5)
    assert as_shape(whole) is whole
    assert as_shape(7) == SampleShape("", 0, 0, 7, 7, 7)
    assert as_shape({"llm_tokens": 9, "num_tiles": 2}) == SampleShape("", 2, 0, 9, 9, 9)
    for wrong in ("7", {"num_tiles": 1}, {"llm_tokens": 1, "tiles": 2}, True, None):
        with pytest.raises(DataError, match="shape_fn must return"):
            as_shape(wrong)


@pytest.mark.parametrize("collated", [False, True])
def test_measured_shapes_follow_the_rule_of_the_model_family(collated):
    samples = [Sample(9), Sample(10, ((56, 84),)), Sample(8, ((28, 28),) * 3)]
    dataset = SyntheticSamples(samples, tiny_llava())
    for index in range(3):
        sample = {name: value for name, value in dataset[index].items() if name != "length"}
        if collated:  # a raw sample, which only the collator can turn into tokens
            processed = sample
            sample, collate = {"raw": index}, lambda rows, made=processed: PaddedCollator()([made])
        else:
            collate = PaddedCollator()
        expected = dataset.shape(index)
        shape = measured_shape(sample, collate)
        assert (shape.llm_tokens, shape.num_tiles) == (expected["llm_tokens"], expected["num_tiles"])


def test_video_frames_are_counted():
    sample = {"input_ids": [1, 2, 3], "pixel_values_videos": np.zeros((2, 8, 3, 4, 4))}
    assert measured_shape(sample, None).num_frames == 16


def test_a_sample_without_tokens_is_refused():
    with pytest.raises(DataError, match="input_ids"):
        measured_shape({"raw": 1}, lambda rows: {"pixels": 1})


def test_random_state_is_preserved():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), float(torch.rand(())))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with preserved_rng():
        random.random(), np.random.rand(), torch.rand(3)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected
