"""The callback in one process: same global batches, lengths, resume, evaluation, metrics, refusals."""

from __future__ import annotations

import json
import logging

import datasets
import pytest
import torch
from transformers import TrainerCallback

from benchmarks.hf_data import IGNORED
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.integrations.hf_trainer import DflopCallback
from tests.support.hf import NUM_SAMPLES, make_trainer, plain_order, trainer_of


def watch(trainer, dataset):
    """Sample indices of every microbatch that the model trains on, by their supervised tokens."""
    known = {tuple(f["labels"][f["labels"] != IGNORED].tolist()): i for i, f in enumerate(dataset)}
    seen = []

    def note(module, args, kwargs):
        if module.training:
            rows = [tuple(row[row != IGNORED].tolist()) for row in kwargs["labels"]]
            seen.append([known[row] for row in rows])

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def plain_chunks(batch_size):
    """Microbatches of the plain order, of the first three epochs."""
    orders = [plain_order(NUM_SAMPLES, epoch) for epoch in range(3)]
    return [order[k : k + batch_size] for order in orders for k in range(0, NUM_SAMPLES, batch_size)]


def by_step(seen, accumulation, per_epoch):
    """Sorted samples of every optimizer step; `per_epoch` microbatches make an epoch."""
    steps = []
    for start in range(0, len(seen), per_epoch):
        epoch = seen[start : start + per_epoch]
        steps += [
            sorted(i for members in epoch[k : k + accumulation] for i in members)
            for k in range(0, len(epoch), accumulation)
        ]
    return steps


@pytest.mark.parametrize(
    "workers", [{}, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}]
)
def test_global_batches_are_those_of_the_plain_order_and_epochs_reshuffle(
    dataset, config, tmp_path, profile, workers
):
    arguments = {"num_train_epochs": 2, **workers}
    trainer = trainer_of(dataset, config, tmp_path, {"profile": profile}, accumulation=3, arguments=arguments)
    seen = watch(trainer, dataset)
    trainer.train()
    orders = [plain_order(NUM_SAMPLES, epoch) for epoch in range(2)]
    expected = [sorted(order[k : k + 6]) for order in orders for k in range(0, NUM_SAMPLES, 6)]
    assert by_step(seen, 3, 11) == expected
    assert seen[:11] != [order[k : k + 2] for order in orders for k in range(0, 22, 2)][:11]  # rearranged
    assert trainer.state.global_step == 8 and trainer.state.epoch == 2.0


@pytest.mark.parametrize("drop_last", [True, False])
def test_max_steps_and_schedule_end_exactly(dataset, config, tmp_path, profile, drop_last):
    arguments = {"max_steps": 7, "dataloader_drop_last": drop_last}
    trainer = trainer_of(
        dataset,
        config,
        tmp_path,
        {"profile": profile},
        accumulation=2,
        batch_size=4,
        schedule="linear",
        arguments=arguments,
    )
    seen = watch(trainer, dataset)
    trainer.train()
    assert trainer.state.global_step == 7
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
    per_epoch = NUM_SAMPLES // 4 if drop_last else -(-NUM_SAMPLES // 4)
    assert len(seen) == 7 * 2 - (7 // (-(-per_epoch // 2))) * (per_epoch % 2)
    epoch = [i for members in seen[:per_epoch] for i in members]
    assert sorted(epoch) == sorted(plain_order(NUM_SAMPLES, 0)[: 20 if drop_last else 21])


def test_resume_in_the_middle_of_an_epoch_continues_the_same_order(dataset, config, tmp_path, clock):
    case = {"accumulation": 2, "save_steps": 8, "arguments": {"num_train_epochs": 3}}
    whole = trainer_of(dataset, config, tmp_path, {"warmup_steps": 4}, **case)
    clock(whole)
    seen = watch(whole, dataset)
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-8"  # step 3 of the second epoch of six
    stored = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"][
        "DflopCallback"
    ]
    assert len(stored["attributes"]["progress"]["entries"]) == 1
    for restore in (False, True):
        again_case = {**case, "output_dir": str(tmp_path / f"again{restore}")}
        again_case["arguments"] = {**case["arguments"], "restore_callback_states_from_checkpoint": restore}
        again = trainer_of(dataset, config, tmp_path, {"warmup_steps": 4}, **again_case)
        later = watch(again, dataset)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert later == seen[11 + 4 :]
        assert [members for members in later if members not in plain_chunks(2)]  # rearranged


def test_a_run_may_be_resumed_with_other_microbatches_of_the_same_global_batch(
    dataset, config, tmp_path, profile
):
    case = {"accumulation": 4, "save_steps": 4, "arguments": {"num_train_epochs": 3}}
    whole = trainer_of(dataset, config, tmp_path, {"profile": profile}, **case)
    seen = watch(whole, dataset)
    whole.train()
    case |= {"accumulation": 2, "batch_size": 4, "output_dir": str(tmp_path / "again")}
    again = trainer_of(dataset, config, tmp_path, {"profile": profile}, **case)
    later = watch(again, dataset)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    # Three steps of 8, 8 and 5 samples make an epoch: the checkpoint lies one step into the second one.
    assert by_step(seen, 4, 11)[4:6] == by_step(later[:4], 2, 4)
    assert by_step(seen, 4, 11)[6:] == by_step(later[4:], 2, 6)


def test_metrics_are_logged_beside_each_record(dataset, config, tmp_path, profile):
    trainer = trainer_of(dataset, config, tmp_path, {"profile": profile}, accumulation=2)
    trainer.train()
    records = [record for record in trainer.state.log_history if "dflop/measured_step_s" in record]
    assert [record["step"] for record in records] == list(range(1, 7))
    names = {name.removeprefix("dflop/") for name in records[0] if name.startswith("dflop/")}
    assert names == {
        "imbalance",
        "padding_share",
        "useful_tokens_per_s",
        "predicted_step_s",
        "measured_step_s",
        "gain_estimate",
        "planning_s",
        "fallbacks",
    }
    first = sum(len(dataset[i]["input_ids"]) for i in plain_order(NUM_SAMPLES, 0)[:4])
    assert records[0]["dflop/useful_tokens_per_s"] * records[0]["dflop/measured_step_s"] == pytest.approx(
        first
    )


def test_costs_are_measured_saved_and_reused(dataset, config, tmp_path, clock):
    path = tmp_path / "measured.json"
    settings = {"warmup_steps": 4, "save_profile": str(path)}
    trainer = trainer_of(
        dataset, config, tmp_path, settings, accumulation=4, arguments={"num_train_epochs": 4}
    )
    clock(trainer)
    trainer.train()
    records = [record for record in trainer.state.log_history if "dflop/planning_s" in record]
    known = ["dflop/gain_estimate" in record for record in records]
    # The first step is not measured, four are, and the next one is planned before their times are known.
    assert known == [False] * 6 + [True] * 6
    measured = json.loads(path.read_text())
    forward = {"token_s": 2e-5, "squared_token_s": 0.0, "encoder_input_s": 3e-3, "overhead_s": 1e-3}
    assert {name: measured[name] for name in forward} == pytest.approx(
        {name: 3 * value for name, value in forward.items()}, rel=1e-6, abs=1e-12
    )
    again = trainer_of(dataset, config, tmp_path, {"profile": str(path)}, accumulation=4)
    again.train()
    assert all("dflop/gain_estimate" in r for r in again.state.log_history if "dflop/planning_s" in r)


def test_evaluation_is_untouched_and_the_trainer_is_left_as_it_was(dataset, config, tmp_path, profile):
    case = {"accepts": False, "arguments": {"per_device_eval_batch_size": 3, "max_steps": 2}}
    plain = make_trainer({"name": "plain", **case}, config, dataset, tmp_path)
    expected = plain.evaluate(dataset)["eval_loss"]
    trainer = trainer_of(dataset, config, tmp_path, {"profile": profile}, lr=0.0, **case)
    losses = []
    trainer.add_callback(_EvaluateInside(trainer, dataset, losses))
    trainer.train()
    assert losses == [expected] * 2
    assert "compute_loss" not in vars(trainer) and "get_batch_samples" not in vars(trainer)


class _EvaluateInside(TrainerCallback):
    def __init__(self, trainer, dataset, losses):
        self._trainer, self._dataset, self._losses = trainer, dataset, losses

    def on_step_end(self, args, state, control, **kwargs):
        self._losses.append(self._trainer.evaluate(self._dataset)["eval_loss"])


def test_settings_from_a_file_without_naming_the_trainer(dataset, config, tmp_path, profile):
    path = tmp_path / "callback.json"
    path.write_text(json.dumps({"profile": profile, "collator": "padded"}))
    trainer = make_trainer({"name": "run", "accumulation": 2}, config, dataset, tmp_path)
    trainer.add_callback(DflopCallback.from_config(path))
    trainer.train()
    assert any("dflop/gain_estimate" in record for record in trainer.state.log_history)


def test_length_column_works_although_the_trainer_removes_it(config, dataset, tmp_path, profile):
    rows = [
        {"input_ids": f["input_ids"].tolist(), "labels": f["labels"].tolist(), "length": len(f["input_ids"])}
        for f in dataset
        if "pixel_values" not in f
    ]
    table = datasets.Dataset.from_list(rows).with_format("torch")
    trainer = trainer_of(table, config, tmp_path, {"profile": profile}, accumulation=2)
    assert trainer.args.remove_unused_columns
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"].sum(dim=1).tolist()),
        with_kwargs=True,
    )
    trainer.train()
    assert sorted(length for batch in seen for length in batch) == sorted(row["length"] for row in rows)
    assert any("dflop/gain_estimate" in record for record in trainer.state.log_history)


def test_missing_and_constant_shapes_warn(dataset, config, tmp_path, caplog, profile):
    with caplog.at_level(logging.WARNING, logger="dflop_ds"):
        trainer_of(dataset, config, tmp_path, {"profile": profile}).train()
    assert "no shapes are given: all 21 samples" in caplog.text
    caplog.clear()
    trainer = make_trainer({"name": "constant"}, config, dataset, tmp_path)
    trainer.add_callback(DflopCallback(trainer, shape_fn=lambda sample: 7, config={"profile": profile}))
    with caplog.at_level(logging.WARNING, logger="dflop_ds"):
        trainer.train()
    assert "all 21 samples have the same shape (7 tokens, 0 encoder inputs)" in caplog.text


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_orders_that_are_decided_elsewhere_are_refused(dataset, config, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(dataset, config, tmp_path, arguments=arguments).train()


def test_a_second_callback_is_refused(dataset, config, tmp_path, profile):
    trainer = trainer_of(dataset, config, tmp_path, {"profile": profile})
    trainer.add_callback(DflopCallback(trainer, config={"profile": profile}))
    with pytest.raises(ConfigError, match="found a second one"):
        trainer.train()


@pytest.mark.parametrize("lengths", [["a"] * 4, [None] * 4, [-3, 1, 1, 1], [1.5] * 4, [[1, 2]] * 4])
def test_a_length_column_that_counts_nothing_is_named(config, tmp_path, lengths):
    rows = [{"input_ids": [9] * 6, "labels": [9] * 6, "length": length} for length in lengths]
    table = datasets.Dataset.from_list(rows).with_format("torch")
    with pytest.raises(DataError, match=r"column 'length' must hold the tokens of each sample"):
        trainer_of(table, config, tmp_path).train()


def test_measured_costs_that_cannot_be_saved_do_not_end_the_run(dataset, config, tmp_path, clock, caplog):
    settings = {"warmup_steps": 4, "save_profile": str(tmp_path / "missing" / "cost.json")}
    trainer = trainer_of(dataset, config, tmp_path, settings, accumulation=4, arguments={"max_steps": 9})
    clock(trainer)
    trainer.train()
    assert trainer.state.global_step == 9
    assert "save_profile must be a writable path" in caplog.text


def test_streams_are_refused(config, tmp_path):
    trainer = trainer_of(_Stream(), config, tmp_path, arguments={"max_steps": 1})
    with pytest.raises(ConfigError, match="map-style"):
        trainer.train()


def test_bad_settings_and_shapes_are_named(dataset, config, tmp_path):
    with pytest.raises(ConfigError, match="warmup_steps"):
        DflopCallback(config={"warm_up_steps": 3})
    with pytest.raises(ConfigError, match="mapping of settings, found a list"):
        DflopCallback(config=[1])
    with pytest.raises(ConfigError, match="readable JSON"):
        DflopCallback.from_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="one Trainer, found 0"):
        DflopCallback().on_train_begin(None, None, None, train_dataloader=None)
    trainer = make_trainer({"name": "bad"}, config, dataset, tmp_path)
    trainer.add_callback(DflopCallback(trainer, shape_fn=lambda sample: "long"))
    with pytest.raises(DataError, match=r"training sample 0.*shape_fn must return"):
        trainer.train()
