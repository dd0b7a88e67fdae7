"""What the Trainer callback relies on in transformers and accelerate; run with every supported release."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from benchmarks.hf_data import PaddedCollator, SyntheticSamples
from dflop_ds.integrations.hf_compat import TRAINER_METHODS, count_items, find_trainer, replace_batch_sampler
from tests.support.hf import SEED, build, make_samples, make_trainer, plain_order


class Recorder(torch.utils.data.Sampler):
    """Two batches; notes the epochs that it is told."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([[3, 1, 2], [0]])


class Observer(TrainerCallback, ExportableState):
    """Notes what events are given."""

    def __init__(self, note=None):
        self.note, self.loader, self.epochs, self.microbatches = note, None, [], []

    def state(self):
        return {"args": {"note": "kept"}, "attributes": {"loader": None}}

    def on_train_begin(self, args, state, control, **kwargs):
        self.loader = kwargs["train_dataloader"]
        self.sampler = Recorder()
        replace_batch_sampler(self.loader, self.sampler)

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epochs.append(state.epoch)

    def on_substep_end(self, args, state, control, **kwargs):
        self.microbatches.append("more")

    def on_step_end(self, args, state, control, **kwargs):
        self.microbatches.append("last")


@pytest.fixture
def trainer(tmp_path):
    config = build()
    dataset = SyntheticSamples(make_samples("mixed", 4), config)
    case = {"name": "run", "save_steps": 2, "arguments": {"num_train_epochs": 2}}
    return make_trainer(case, config, dataset, tmp_path)


@pytest.mark.parametrize("name", TRAINER_METHODS)
def test_wrapped_methods_have_their_parameters(name):
    parameters = list(inspect.signature(getattr(Trainer, name)).parameters)
    assert parameters[: len(TRAINER_METHODS[name])] == list(TRAINER_METHODS[name])


def test_prepared_loader_follows_a_replaced_batch_sampler(trainer):
    loader = trainer.get_train_dataloader()
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader.get_sampler(), SeedableRandomSampler)
    loader.get_sampler().set_epoch(3)
    assert list(loader.get_sampler()) == plain_order(4, 3)
    assert loader.get_sampler().initial_seed == SEED
    assert loader.batch_sampler.batch_size == 2
    sampler = Recorder()
    replace_batch_sampler(loader, sampler)
    assert loader.batch_sampler is sampler and len(loader) == 2
    assert [len(batch["input_ids"]) for batch in loader] == [3, 1]
    loader.set_epoch(5)
    assert sampler.epochs[-1] == 5
    rest = skip_first_batches(loader, 1)
    assert len(rest) == 1 and rest.batch_sampler.batch_sampler is sampler
    assert [len(batch["input_ids"]) for batch in rest] == [1]


def test_training_loop_uses_the_loader_that_events_are_given(trainer):
    observer = Observer()
    trainer.add_callback(observer)
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer.train()
    assert shapes == [3, 1, 3, 1]
    assert observer.epochs == [0, 1.0]
    assert observer.sampler.epochs[-1] == 1
    assert trainer.state.global_step == 4


def test_each_microbatch_ends_in_an_event(trainer):
    trainer.args.gradient_accumulation_steps = 2
    observer = Observer()
    trainer.add_callback(observer)
    trainer.train()
    assert observer.microbatches == ["more", "last"] * 2


def test_state_of_a_callback_is_in_the_checkpoint(trainer, tmp_path):
    trainer.add_callback(Observer())
    trainer.train()
    stored = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert stored["stateful_callbacks"]["Observer"]["args"] == {"note": "kept"}
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert trainer.state.stateful_callbacks["Observer"]["args"] == {"note": "kept"}


def test_items_are_counted_as_the_trainer_counts_them(trainer):
    features = [{k: v for k, v in trainer.train_dataset[i].items() if k != "length"} for i in range(4)]
    batch = PaddedCollator()(features)
    _, expected = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert count_items(trainer, batch) == int(expected)
    assert count_items(trainer, {"input_ids": batch["input_ids"]}) is None


def test_the_trainer_of_a_callback_is_found(trainer):
    observer = Observer()
    trainer.add_callback(observer)
    assert find_trainer(observer) is trainer
