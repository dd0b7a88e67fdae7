"""Every private, or not promised, name of transformers and accelerate that the callback relies on.

``tests/contract/test_hf_trainer_contract.py`` checks each of them against the installed versions.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from transformers import Trainer, TrainerCallback

from dflop_ds.errors import ConfigError

TRAINER_METHODS: dict[str, tuple[str, ...]] = {
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
}
"""Public methods of ``Trainer`` that the callback wraps, with their parameter names."""


def replace_batch_sampler(loader: DataLoaderShard, batch_sampler: Any) -> None:
    """Let a prepared loader draw its batches from another batch sampler.

    A PyTorch loader refuses to have its batch sampler assigned, so the entry is put where the loader reads
    it:
    accelerate's wrapper shows the attributes of ``base_dataloader``, and both take the length from there too.
    """
    vars(loader.base_dataloader)["batch_sampler"] = batch_sampler


def labels_are_shifted(trainer: Trainer) -> bool:
    """Whether the model's loss skips the first label of each row, as the Trainer has found out."""
    return bool(trainer._loss_shifts_labels)


def count_items(trainer: Trainer, batch: dict[str, Any]) -> int | None:
    """Supervised positions of a batch, counted as the Trainer counts them; None without labels."""
    if not isinstance(batch.get("labels"), torch.Tensor):
        return None
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"][..., 1:] if labels_are_shifted(trainer) else batch["labels"]
    return int(labels.ne(-100).sum())


def find_trainer(callback: TrainerCallback) -> Trainer:
    """The Trainer that holds a callback: events do not name it.

    Raises
    ------
    ConfigError
        If none, or more than one, holds it.
    """
    found = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), Trainer)
        and any(held is callback for held in getattr(item.callback_handler, "callbacks", ()))
    ]
    if len(found) != 1:
        raise ConfigError(
            f"a DflopCallback must belong to one Trainer, found {len(found)}. Give it: "
            "DflopCallback(trainer)."
        )
    return found[0]
