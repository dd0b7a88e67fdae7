"""Data-aware microbatches for Hugging Face ``Trainer``: one line added to a training script.

::

    trainer = Trainer(model=..., args=..., train_dataset=..., data_collator=...)
    trainer.add_callback(DflopCallback(trainer))
    trainer.train()
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from dflop_ds.errors import ConfigError
from dflop_ds.integrations.hf_calibration import Calibration, backward_factors
from dflop_ds.integrations.hf_checks import check_trainer, on_every_rank, sync_point
from dflop_ds.integrations.hf_compat import find_trainer, replace_batch_sampler
from dflop_ds.integrations.hf_config import TrainerCallbackConfig, load_config, parse_config
from dflop_ds.integrations.hf_media import DummyMedia
from dflop_ds.integrations.hf_metrics import StepMetrics
from dflop_ds.integrations.hf_profile import load_cost
from dflop_ds.integrations.hf_sampler import BalancedBatchSampler
from dflop_ds.integrations.hf_session import StepSession
from dflop_ds.integrations.hf_shapes import ShapeFn, preserved_rng, trainer_shapes
from dflop_ds.scheduling.problem import IntArray
from dflop_ds.scheduling.rank_planner import CostTimeline, RankLayout, RankPlanner
from dflop_ds.shapes import ShapeTable

__all__ = ("DflopCallback",)

logger = logging.getLogger(__name__)

# A Trainer that restores callbacks from a checkpoint builds them anew from JSON; a function is not in there.
_shape_fns: WeakKeyDictionary[Trainer, ShapeFn] = WeakKeyDictionary()


class DflopCallback(TrainerCallback, ExportableState):
    """Rearranges the samples of every global batch among ranks and accumulation steps.

    Each optimizer step trains on the samples that the Trainer's own order gives it, each of them once, and
    on the same mean loss. Only who computes what changes. Works with DeepSpeed ZeRO 1 to 3, DDP and a single
    process.

    Parameters
    ----------
    trainer : Trainer, optional
        Found by itself when training begins, if not given.
    shape_fn : callable, optional
        Sizes of a training sample: a :class:`~dflop_ds.shapes.SampleShape`, a mapping with some of its fields
        (``llm_tokens`` at least), or the number of LLM tokens.
    config : TrainerCallbackConfig or mapping, optional

    Raises
    ------
    ConfigError
        If the configuration is wrong; when training begins, if the Trainer cannot be rearranged.
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        *,
        shape_fn: ShapeFn | None = None,
        config: TrainerCallbackConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if trainer is not None and not isinstance(trainer, Trainer):
            raise ConfigError(f"trainer must be a transformers.Trainer, found {type(trainer).__name__}.")
        if not isinstance(config, TrainerCallbackConfig):
            config = parse_config(config or {})
        self.config: TrainerCallbackConfig = config
        self.progress: dict[str, Any] | None = None
        self._trainer, self._shape_fn = trainer, shape_fn
        if trainer is not None and shape_fn is not None:
            _shape_fns[trainer] = shape_fn
        self._session: StepSession | None = None
        self._next_epoch, self._num_skipped = 0, 0
        self._is_logging = False

    @classmethod
    def from_config(
        cls, path: str | Path, trainer: Trainer | None = None, *, shape_fn: ShapeFn | None = None
    ) -> DflopCallback:
        """Callback with the settings of a JSON file, see :class:`TrainerCallbackConfig`."""
        return cls(trainer, shape_fn=shape_fn, config=load_config(path))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the settings, and which costs were used from which step on."""
        if self._session is not None:
            self.progress = self._session.planner.timeline.to_dict()
        return {
            "args": {"config": self.config.model_dump()},
            "attributes": {"progress": self.progress},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the planned batches into the prepared loader."""
        self._close()
        trainer = self._trainer = self._trainer or find_trainer(self)
        loader = kwargs["train_dataloader"]
        planner = on_every_rank(trainer, lambda: self._prepare(trainer, loader, state))
        sampler = BalancedBatchSampler(planner, args.process_index)
        replace_batch_sampler(loader, sampler)
        dummies = DummyMedia(trainer.model.config, _collate_one(loader), planner)
        self._session = StepSession(
            trainer,
            sampler,
            dummies,
            self._calibration(trainer, planner),
            StepMetrics(),
            self.config.save_profile,
        )
        steps = planner.layout.steps_per_epoch
        self._next_epoch = state.global_step // steps
        self._num_skipped = 0 if args.ignore_data_skip else state.global_step % steps

    def _prepare(self, trainer: Trainer, loader: Any, state: Any) -> RankPlanner:
        """Check the Trainer and plan over its data."""
        check_trainer(trainer, loader)
        progress = self._stored_progress(state) if state.global_step else None
        shape_fn = self._shape_fn or _shape_fns.get(trainer)
        planner = make_planner(trainer, loader, self.config, shape_fn, progress)
        rank, num_batches = trainer.args.process_index, planner.layout.batches_per_rank
        if num_batches != len(loader):
            raise ConfigError(
                f"an epoch must have {len(loader)} batches on rank {rank}, as the Trainer has counted, the "
                f"callback would give {num_batches}. Keep accelerator_config even_batches=True and a sampler "
                "over the whole data set."
            )
        return planner

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the epoch that the Trainer begins."""
        if self._session is not None:
            self._session.begin_epoch(self._next_epoch, self._num_skipped)
            self._next_epoch, self._num_skipped = self._next_epoch + 1, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on to the next microbatch of the step."""
        if self._session is not None:
            self._session.end_microbatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step that has ended."""
        if self._session is not None:
            self._session.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log our numbers beside each training record of the Trainer."""
        if self._session is None or self._is_logging or not logs or "loss" not in logs:
            return
        metrics = self._session.metrics.take()
        if metrics and self._trainer is not None:
            self._is_logging = True
            try:
                self._trainer.log(metrics)
            finally:
                self._is_logging = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the Trainer as it was."""
        self._close()

    def _close(self) -> None:
        if self._session is not None:
            self.state()
            self._session.close()
            self._session = None

    def _stored_progress(self, state: Any) -> dict[str, Any] | None:
        stored = state.stateful_callbacks.get(type(self).__name__)
        entries = stored if isinstance(stored, list) else [stored]
        for entry in entries:
            if isinstance(entry, dict) and entry.get("attributes", {}).get("progress"):
                return entry["attributes"]["progress"]
        logger.warning("the checkpoint holds no state of DflopCallback: costs are measured again.")
        return None

    def _calibration(self, trainer: Trainer, planner: RankPlanner) -> Calibration | None:
        if planner.timeline.newest is not None or self.config.policy == "blind":
            return None
        llm, encoder = backward_factors(trainer.model)
        return Calibration(
            self.config.warmup_steps,
            waits_for_slowest=planner.sync == "phase" and trainer.args.world_size > 1,
            llm_factor=llm,
            encoder_factor=encoder,
        )


def make_planner(
    trainer: Trainer,
    loader: Any,
    config: TrainerCallbackConfig,
    shape_fn: ShapeFn | None,
    progress: dict[str, Any] | None,
) -> RankPlanner:
    """Plans over the training data of a Trainer, in the order of its own sampler.

    Costs are those of a checkpoint (`progress`), of a profile, or not known yet.
    """
    table = trainer_shapes(trainer, loader.collate_fn, config, shape_fn)
    timeline = CostTimeline()
    if progress is not None:
        timeline = CostTimeline.from_dict(progress)
    elif config.profile is not None:
        cost = load_cost(config.profile, trainer.model.config, table, loader.batch_sampler.batch_size)
        timeline.add(0, cost)
    layout = RankLayout(
        num_samples=len(loader.dataset),
        batch_size=loader.batch_sampler.batch_size,
        num_ranks=trainer.args.world_size,
        num_slots=trainer.args.gradient_accumulation_steps,
        drop_last=loader.batch_sampler.drop_last,
    )
    return RankPlanner(
        table,
        layout,
        _epoch_order(loader.get_sampler()),
        padded=_is_padded(loader, table, config),
        sync=sync_point(trainer) if config.sync == "auto" else config.sync,
        policy=config.policy,
        timeline=timeline,
        max_tokens=config.max_tokens,
        max_encoder_inputs=config.max_encoder_inputs,
    )


def _epoch_order(sampler: Any) -> Any:
    def order(epoch: int) -> IntArray:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return np.fromiter(sampler, dtype=np.int64)

    return order


def _is_padded(loader: Any, table: ShapeTable, config: TrainerCallbackConfig) -> bool:
    """Whether two samples of different length become two rows (padded) or one (packed)."""
    if config.collator != "auto" or len(table) < 2:
        return config.collator != "packed"
    rows = np.argsort(table.llm_tokens, kind="stable")[:2].tolist()
    with preserved_rng():
        batch = loader.collate_fn([loader.dataset[row] for row in rows])
    if "input_ids" not in batch:
        raise ConfigError(
            f"a batch must have input_ids to tell padding from packing, found {sorted(batch)}. Set collator "
            "to 'padded' or 'packed'."
        )
    return batch["input_ids"].shape[0] > 1


def _collate_one(loader: Any) -> Any:
    def collate(index: int) -> Any:
        with preserved_rng():
            return loader.collate_fn([loader.dataset[index]])

    return collate
