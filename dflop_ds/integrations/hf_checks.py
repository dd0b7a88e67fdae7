"""What a Trainer must be like for its batches to be rearranged; checked before any collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import Trainer

from dflop_ds.errors import ConfigError, DflopError
from dflop_ds.integrations.hf_sampler import BalancedBatchSampler

logger = logging.getLogger(__name__)

Prepared = TypeVar("Prepared")

_SYNC_OF_ZERO_STAGE = {0: "step", 1: "step", 2: "microbatch", 3: "phase"}


def check_trainer(trainer: Trainer, loader: Any) -> None:
    """Refuse what cannot work.

    Raises
    ------
    ConfigError
        Naming the option, the value found and the remedy.
    """
    args = trainer.args
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__len__"):
        raise ConfigError(
            "the training data must have a length and be indexed, found an iterable data set: samples "
            "cannot be exchanged within a global batch that is not known. Use a map-style data set, or "
            "remove the callback."
        )
    if isinstance(loader, DataLoaderDispatcher):
        raise ConfigError(
            "every rank must load its own batches, found accelerator_config dispatch_batches=True. Remove it."
        )
    if not isinstance(loader, DataLoaderShard):
        raise ConfigError(
            f"the training loader must be prepared by accelerate, found {type(loader).__name__}. Use the "
            "Trainer's own get_train_dataloader."
        )
    if isinstance(loader.batch_sampler, BalancedBatchSampler):
        raise ConfigError(
            "one DflopCallback must rearrange a Trainer, found a second one. Remove one of them "
            "(trainer.remove_callback)."
        )
    refused = {
        "args.n_gpu": (args.n_gpu, args.n_gpu <= 1, "Launch one process per GPU (torchrun or deepspeed)."),
        "args.train_sampling_strategy": (
            args.train_sampling_strategy,
            args.train_sampling_strategy in ("random", "sequential"),
            "Use 'random': the callback decides which samples share a microbatch.",
        ),
        "args.dataloader_in_order": (
            args.dataloader_in_order,
            args.dataloader_in_order,
            "Leave it on: microbatches must arrive as they were planned.",
        ),
        "accelerator_config split_batches": (
            args.accelerator_config.split_batches,
            not args.accelerator_config.split_batches,
            "Remove it; give the batch size per device.",
        ),
        "tensor, sequence or context parallel size": (
            _inner_parallel_size(trainer),
            _inner_parallel_size(trainer) == 1,
            "Every rank must train on samples of its own; use data parallelism alone.",
        ),
        "args.average_tokens_across_devices": (
            args.average_tokens_across_devices,
            args.average_tokens_across_devices or args.world_size == 1 or not _counts_items(trainer),
            "Leave it on: otherwise the gradient depends on which samples share a rank.",
        ),
    }
    for name, (value, is_fine, remedy) in refused.items():
        if not is_fine:
            raise ConfigError(f"{name} does not work with DflopCallback as {value!r}. {remedy}")
    check_sampler(loader.get_sampler())
    if type(trainer).compute_loss is not Trainer.compute_loss and _own_scaling(trainer) is None:
        logger.warning(
            "%s.compute_loss must divide a sum over tokens by num_items_in_batch, or else the gradient "
            "depends on which samples share a microbatch. Set loss_is_scaled_for_ga of the class: False "
            "where it returns a mean over the microbatch, True where it divides.",
            type(trainer).__name__,
        )


def on_every_rank(trainer: Trainer, prepare: Callable[[], Prepared]) -> Prepared:
    """What `prepare` returns; if it fails on one rank, all of them stop instead of waiting for it.

    Raises
    ------
    Exception
        This rank's own error, or a DflopError that names the ranks that have failed.
    """
    own: Exception | None = None
    try:
        prepared = prepare()
    except Exception as error:
        own = error
    failed = torch.tensor([int(own is not None)], device=trainer.args.device)
    ranks = trainer.accelerator.gather(failed).nonzero().flatten().tolist()
    if own is not None:
        raise own
    if ranks:
        raise DflopError(
            f"every rank must be able to prepare the callback, ranks {ranks} could not. Their messages say "
            "why."
        )
    return prepared


def check_sampler(sampler: Any) -> None:
    """Refuse a sampler whose order is not known ahead of time, the same on every rank."""
    if not isinstance(sampler, (SeedableRandomSampler, SequentialSampler)) and not hasattr(
        sampler, "set_epoch"
    ):
        raise ConfigError(
            "the training sampler must give an order that depends on its epoch alone, found "
            f"{type(sampler).__name__} without set_epoch. Keep the Trainer's own sampler and "
            "accelerator_config use_seedable_sampler=True, or give yours a set_epoch method."
        )


def sync_point(trainer: Trainer) -> str:
    """Where ranks wait for each other, from the ZeRO stage; see ``scheduling.rank_step.SYNC_POINTS``."""
    return "phase" if trainer.is_fsdp_enabled else _SYNC_OF_ZERO_STAGE[_zero_stage(trainer)]


def keeps_old_gradients(trainer: Trainer) -> bool:
    """Whether a parameter that takes no part in a step gets an earlier gradient again, as under ZeRO 3."""
    return _zero_stage(trainer) == 3


def _zero_stage(trainer: Trainer) -> int:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None else int(plugin.zero_stage)


def scales_loss(trainer: Trainer, *, has_labels: bool = True) -> bool:
    """Whether losses must be weighted: they are means over a microbatch.

    Parameters
    ----------
    trainer : Trainer
    has_labels : bool
        Whether batches have ``labels``: the Trainer counts no items without them.
    """
    own = _own_scaling(trainer)
    if own is not None:
        return not own
    return not _counts_items(trainer) or (not has_labels and trainer.compute_loss_func is None)


def _counts_items(trainer: Trainer) -> bool:
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _own_scaling(trainer: Trainer) -> bool | None:
    """What a Trainer says of its own loss; older releases have no word for it."""
    return getattr(trainer, "loss_is_scaled_for_ga", None)


def _inner_parallel_size(trainer: Trainer) -> int:
    return int(trainer.get_tp_size() * trainer.get_sp_size() * trainer.get_cp_size())
