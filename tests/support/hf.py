"""Small Trainers, and the same training as a plain loop in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaOnevisionForConditionalGeneration, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from benchmarks.hf_data import (
    IGNORED,
    PackedCollator,
    PaddedCollator,
    Sample,
    SyntheticSamples,
    build_model,
    mixed_samples,
    tiny_llava,
)
from dflop_ds.integrations.hf_trainer import DflopCallback

NUM_SAMPLES = 21
SEED = 11
LR = 0.5
COST = {
    "schema_version": 1,
    "token_s": 1e-4,
    "squared_token_s": 1e-8,
    "encoder_input_s": 5e-3,
    "overhead_s": 1e-3,
}
COLLATORS = {"padded": PaddedCollator, "packed": PackedCollator}


class NoLossKwargs(LlavaOnevisionForConditionalGeneration):
    """A model whose loss is a mean over the microbatch: it is not told how many items the batch has."""

    accepts_loss_kwargs = False


def build() -> Any:
    """Configuration of the tiny model."""
    return tiny_llava()


def make_samples(kind: str, num_samples: int) -> list[Sample]:
    """Mixed samples, or ``one_image``: text, but for the first one."""
    if kind == "mixed":
        return mixed_samples(num_samples, seed=2, tile_px=28)
    return [Sample(12 + i, ((28, 56),) if i == 0 else ()) for i in range(num_samples)]


def ds_config(stage: int) -> dict[str, Any]:
    """DeepSpeed configuration of a Trainer on CPU."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def make_trainer(case: dict[str, Any], config: Any, dataset: SyntheticSamples, out: Path) -> Trainer:
    """A Trainer that takes plain SGD steps in the seeded random order."""
    unset_hf_deepspeed_config()  # an earlier ZeRO 3 case would partition this model while it is built
    model = build_model(config)
    if not case.get("accepts", True):
        model.__class__ = NoLossKwargs
    arguments = TrainingArguments(
        str(case.get("output_dir", out / case["name"])),
        per_device_train_batch_size=case.get("batch_size", 2),
        gradient_accumulation_steps=case.get("accumulation", 1),
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=case.get("lr", LR),
        lr_scheduler_type=case.get("schedule", "constant"),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="steps" if case.get("save_steps") else "no",
        save_steps=case.get("save_steps", 500),
        data_seed=SEED + case.get("seed_shift", 0) * int(os.environ.get("RANK", "0")),
        deepspeed=None if case.get("zero") is None else ds_config(case["zero"]),
        **{"num_train_epochs": 1, **case.get("arguments", {})},
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=COLLATORS[case.get("collator", "padded")](),
    )


def trainer_of(
    dataset: Any, config: Any, out: Path, settings: dict[str, Any] | None = None, **case: Any
) -> Trainer:
    """A Trainer with the callback."""
    trainer = make_trainer({"name": "run", **case}, config, dataset, out)
    trainer.add_callback(DflopCallback(trainer, config=settings or {}))
    return trainer


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain_order(num_samples: int, epoch: int) -> list[int]:
    """Seeded random order of an epoch, straight from PyTorch."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


def plain_training(
    dataset: SyntheticSamples, config: Any, batch_size: int, num_epochs: int = 1
) -> torch.Tensor:
    """Weights after SGD on the token mean of whole global batches, sample by sample in one process."""
    model = build_model(config).train()
    collate = PaddedCollator()
    for epoch in range(num_epochs):
        order = plain_order(len(dataset), epoch)
        for start in range(0, len(order), batch_size):
            features = [dataset[i] for i in order[start : start + batch_size]]
            num_items = sum(int((feature["labels"][1:] != IGNORED).sum()) for feature in features)
            for feature in features:
                batch = collate([{key: value for key, value in feature.items() if key != "length"}])
                model(**batch, num_items_in_batch=num_items).loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
            model.zero_grad()
    return weights(model)
