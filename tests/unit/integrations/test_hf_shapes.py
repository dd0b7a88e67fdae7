"""Sizes of Trainer samples: what shape functions may return, and what is read from samples."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.hf_data import PaddedCollator, Sample, SyntheticSamples, tiny_llava
from dflop_ds.errors import DataError
from dflop_ds.integrations.hf_config import TrainerCallbackConfig
from dflop_ds.integrations.hf_shapes import as_shape, measured_shape, preserved_rng, trainer_shapes
from dflop_ds.shapes import SampleShape, ShapeTable


def test_what_a_shape_function_may_return():
    whole = SampleShape("a", 1, 2, 3, 4, 5)
    assert as_shape(whole) is whole
    assert as_shape(7) == SampleShape("", 0, 0, 7, 7, 7)
    assert as_shape({"llm_tokens": 9, "num_tiles": 2}) == SampleShape("", 2, 0, 9, 9, 9)
    audio = {"llm_tokens": 9, "audio_s": 1.5, "audio_positions": 75}
    assert as_shape(audio) == SampleShape("", 0, 0, 9, 9, 9, audio_s=1.5, audio_positions=75)
    for negative in (-1, {"llm_tokens": 1, "num_tiles": -2}, SampleShape("", 0, 0, 1, 1, -1)):
        with pytest.raises(DataError, match="must not be negative"):
            as_shape(negative)
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


def trainer_over(samples):
    accelerator = SimpleNamespace(num_processes=1, process_index=0, gather=lambda rows: rows)
    args = SimpleNamespace(device="cpu", length_column_name="length")
    return SimpleNamespace(train_dataset=samples, accelerator=accelerator, args=args)


def test_all_sizes_that_a_shape_function_gives_are_kept():
    sizes = [SampleShape("", 0, 0, 3, 9 + i, 2, 1.5, 0, 0, 25, 5 * i) for i in range(3)]
    table = trainer_shapes(trainer_over(sizes), None, TrainerCallbackConfig(), lambda sample: sample)
    assert table.encoder_inputs.tolist() == [0, 5, 10]
    assert table.audio_s.tolist() == [1.5] * 3 and table.llm_tokens.tolist() == [9, 10, 11]


def test_a_table_of_another_data_set_is_refused(tmp_path):
    path = tmp_path / "shapes.npz"
    ShapeTable.from_shapes([SampleShape("", 0, 0, 3, 9, 2)] * 2).save(path)
    with pytest.raises(DataError, match=r"one row per training sample \(3\), found 2"):
        trainer_shapes(trainer_over([0, 1, 2]), None, TrainerCallbackConfig(shapes=str(path)), None)


def test_random_state_is_preserved():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = (random.random(), np.random.rand(), float(torch.rand(())))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with preserved_rng():
        random.random(), np.random.rand(), torch.rand(3)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected
