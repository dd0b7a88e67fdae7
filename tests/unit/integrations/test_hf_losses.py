"""Weights after training with the callback are those of a plain loop, whatever the Trainer's loss is like."""

from __future__ import annotations

import pytest
import torch
from transformers import LlavaOnevisionForConditionalGeneration, Trainer

from benchmarks.hf_data import PaddedCollator, Sample, SyntheticSamples, build_model
from dflop_ds.errors import PlanError
from tests.support.hf import LR, make_trainer, plain_training, trainer_of, weights


@pytest.mark.parametrize("collator", ["padded", "packed"])
@pytest.mark.parametrize("accepts", [True, False])
def test_training_equals_a_plain_loop_over_whole_global_batches(
    dataset, config, tmp_path, profile, collator, accepts
):
    trainer = trainer_of(
        dataset, config, tmp_path, {"profile": profile}, accumulation=3, collator=collator, accepts=accepts
    )
    trainer.train()
    expected = plain_training(dataset, config, 6)
    start = weights(make_trainer({"name": "start"}, config, dataset, tmp_path).model)
    change = (expected - start).norm()
    assert float((weights(trainer.model) - expected).norm() / change) < 1e-5


class _OwnLoss(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class _NoLabels(LlavaOnevisionForConditionalGeneration):
    """Takes loss arguments, but its batches have no labels; the loss is a mean over samples."""

    def forward(self, num_items_in_batch=None, labels=None, **inputs):
        outputs = super().forward(**inputs)
        outputs.loss = outputs.logits[:, 0].square().mean()
        return outputs


def _without_labels(features):
    batch = PaddedCollator()(features)
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def test_a_trainer_with_a_mean_loss_of_its_own_is_weighted(dataset, config, tmp_path, profile, caplog):
    trainer = trainer_of(dataset, config, tmp_path, {"profile": profile}, accumulation=3)
    trainer.__class__ = _OwnLoss
    trainer.train()
    expected = plain_training(dataset, config, 6)
    start = weights(make_trainer({"name": "start"}, config, dataset, tmp_path).model)
    assert float((weights(trainer.model) - expected).norm() / (expected - start).norm()) < 1e-5
    trainer.loss_is_scaled_for_ga = None
    trainer.train()
    assert "_OwnLoss.compute_loss must divide" in caplog.text


class _TwoPasses(Trainer):
    """Half of the gradient from each of two passes, as adversarial training does it."""

    loss_is_scaled_for_ga = False

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        for _ in range(2):
            loss = self.compute_loss(model, dict(inputs)) / (2 * self.current_gradient_accumulation_steps)
            self.accelerator.backward(loss)
        return loss.detach()


class _OwnStep(Trainer):
    loss_is_scaled_for_ga = False

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model.train()(**inputs).loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_every_loss_of_a_microbatch_has_its_weight(dataset, config, tmp_path, clock):
    trainer = trainer_of(
        dataset,
        config,
        tmp_path,
        {"warmup_steps": 2},
        accumulation=3,
        accepts=False,
        arguments={"num_train_epochs": 3},
    )
    trainer.__class__ = _TwoPasses
    clock(trainer)
    trainer.train()
    expected = plain_training(dataset, config, 6, num_epochs=3)
    start = weights(make_trainer({"name": "start"}, config, dataset, tmp_path).model)
    assert float((weights(trainer.model) - expected).norm() / (expected - start).norm()) < 1e-5
    cost = trainer.callback_handler.callbacks[-1].progress["entries"][0]["cost"]
    assert cost["encoder_input_s"] == pytest.approx(2 * 3 * 3e-3)  # both passes, times forward and backward
    trainer.__class__ = _OwnStep
    with pytest.raises(PlanError, match=r"all 3 microbatches must come from compute_loss.*found 0"):
        trainer.train()


def test_batches_without_labels_count_by_their_samples(config, tmp_path, profile):
    texts = SyntheticSamples([Sample(12 + 40 * (i % 3 == 0)) for i in range(9)], config)
    settings, arguments = {"profile": profile, "collator": "padded"}, {"remove_unused_columns": False}
    trainer = trainer_of(texts, config, tmp_path, settings, accumulation=5, arguments=arguments)
    trainer.data_collator = _without_labels
    trainer.model.__class__ = _NoLabels
    sizes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer.train()
    assert sum(sizes) == 9 and len(set(sizes)) > 1
    model = build_model(config).train()
    model.__class__ = _NoLabels
    before = weights(model)
    model(**_without_labels([texts[i] for i in range(9)])).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
    change = (weights(model) - before).norm()
    assert float((weights(trainer.model) - weights(model)).norm() / change) < 1e-5
