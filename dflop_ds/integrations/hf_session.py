"""What the callback does in every step of one call of ``Trainer.train``."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from dflop_ds.cost.microbatch_cost import MicrobatchCost, MicrobatchSizes
from dflop_ds.errors import PlanError
from dflop_ds.integrations.hf_calibration import Calibration, ForwardTimer
from dflop_ds.integrations.hf_checks import keeps_old_gradients, scales_loss
from dflop_ds.integrations.hf_compat import count_items
from dflop_ds.integrations.hf_media import DummyMedia, mask_labels, media_flags, needed_flags
from dflop_ds.integrations.hf_metrics import StepMetrics
from dflop_ds.integrations.hf_sampler import BalancedBatchSampler
from dflop_ds.scheduling.rank_planner import PlannedBins

logger = logging.getLogger(__name__)

_WRAPPED = ("get_batch_samples", "compute_loss")


@dataclasses.dataclass(frozen=True)
class _Report:
    """What every rank tells the others at the start of a step, shape (num_ranks, ...)."""

    checksums: np.ndarray
    next_unplanned: np.ndarray
    items: np.ndarray
    flags: np.ndarray
    forward_s: np.ndarray


class StepSession:
    """Follows the Trainer through one call of ``train``.

    Per optimizer step: the Trainer fetches its microbatches; all ranks exchange one small vector (checksum of
    the plan, supervised items, media present, measured times); microbatches are completed; losses are
    weighted where the model does not know the size of the global batch.

    Parameters
    ----------
    trainer : Trainer
    sampler : BalancedBatchSampler
        Already in the prepared loader.
    media : DummyMedia
    calibration : Calibration or None
        None where costs are known.
    metrics : StepMetrics
    save_profile : str or None
        Where rank 0 writes measured costs.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: BalancedBatchSampler,
        media: DummyMedia,
        calibration: Calibration | None,
        metrics: StepMetrics,
        save_profile: str | None = None,
    ) -> None:
        self.sampler, self.planner, self.metrics = sampler, sampler.planner, metrics
        self._trainer, self._media, self._calibration = trainer, media, calibration
        self._save_profile = save_profile
        self._timer = ForwardTimer(trainer.model) if calibration is not None else None
        self._scales = scales_loss(trainer)
        self._keeps_gradients = keeps_old_gradients(trainer)
        self._seen_flags = 0
        self._position, self._slot = 0, 0
        self._factors: list[float] = []
        self._weighted_slots: set[int] = set()
        self._previous: PlannedBins | None = None
        self._previous_forward_s = np.zeros(0)
        self._started_s = 0.0
        self._originals = {name: getattr(trainer, name) for name in _WRAPPED}
        self._overrides = {name: value for name, value in vars(trainer).items() if name in _WRAPPED}
        trainer.get_batch_samples = self.get_batch_samples
        trainer.compute_loss = self.compute_loss

    def close(self) -> None:
        """Give the Trainer its own methods back."""
        for name in _WRAPPED:
            delattr(self._trainer, name)
        vars(self._trainer).update(self._overrides)
        if self._timer is not None:
            self._timer.remove()

    def begin_epoch(self, epoch: int, num_skipped: int) -> None:
        """Point sampler and plans to an epoch of which some steps are skipped."""
        self.sampler.set_epoch(epoch)
        self.sampler.num_skipped = num_skipped
        self._position = epoch * self.planner.layout.steps_per_epoch + num_skipped

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the microbatches of one step, as ``Trainer.get_batch_samples`` does, and complete them."""
        self._started_s = time.perf_counter()
        planned = self.planner.plan(self._position)
        original = self._originals["get_batch_samples"]
        batches, num_items = original(self._masked(epoch_iterator, planned), num_batches, device)
        if len(batches) != planned.plan.num_microbatches:
            raise PlanError(
                f"step {self._position} must have {planned.plan.num_microbatches} microbatches, the loader "
                f"gave {len(batches)} on rank {self.sampler.rank}. Use the Trainer's own training loop."
            )
        report = self._exchange(planned, batches, device)
        self._calibrate(report)
        if self.planner.layout.num_ranks > 1 or self._keeps_gradients:
            flags = report.flags.astype(int)
            self._media.note(flags.ravel().tolist(), planned.plan.bins)
            self._seen_flags |= int(np.bitwise_or.reduce(flags, axis=None))
            needed = needed_flags(flags.tolist(), self._seen_flags if self._keeps_gradients else 0)
            batches = [self._media.complete(*pair) for pair in zip(batches, needed, strict=True)]
        scales = self._scales or scales_loss(self._trainer, has_labels=num_items is not None)
        self._factors = self._loss_factors(report) if scales else []
        self._slot, self._weighted_slots = 0, set()
        self._previous = planned
        self._position += 1
        return batches, num_items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loss; in training, weighted so that the global batch has one mean."""
        result = self._originals["compute_loss"](model, inputs, *args, **kwargs)
        if not model.training or not self._factors:
            return result
        factor = self._factors[self._slot]
        self._weighted_slots.add(self._slot)
        if isinstance(result, tuple):
            return result[0] * factor, *result[1:]
        return result * factor

    def end_microbatch(self) -> None:
        """Let the next loss be that of the next microbatch."""
        self._slot += 1

    def end_step(self) -> None:
        """Note the times of the step that has just ended.

        Raises
        ------
        PlanError
            If a loss has not got its weight.
        """
        if len(self._weighted_slots) != len(self._factors):
            raise PlanError(
                f"the loss of all {len(self._factors)} microbatches must come from compute_loss of the "
                f"Trainer to be weighted, found {len(self._weighted_slots)}. Call self.compute_loss in "
                "training_step, or set loss_is_scaled_for_ga = True if it divides by num_items_in_batch."
            )
        if self._previous is None:
            return
        if self._timer is not None:
            times_s, num_slots = np.array(self._timer.take()), self._previous.plan.num_microbatches
            is_whole = len(times_s) % num_slots == 0
            self._previous_forward_s = times_s.reshape(num_slots, -1).sum(axis=1) if is_whole else times_s[:0]
        self.metrics.add(self._previous, time.perf_counter() - self._started_s)

    def _masked(self, batches: Iterator[Any], planned: PlannedBins) -> Iterator[Any]:
        """Take the labels off batches that stand for an empty bin, where losses are sums."""
        for members in planned.plan.replica_bins(self.sampler.rank):
            batch = next(batches, None)
            if batch is None:
                return
            yield batch if members or self._scales else mask_labels(batch)

    def _exchange(self, planned: PlannedBins, batches: list[Any], device: torch.device) -> _Report:
        num_slots, rank = len(batches), self.sampler.rank
        capacity = self.planner.layout.num_slots
        members = planned.plan.replica_bins(rank)
        row = np.full((3, capacity), np.nan)
        for slot, batch in enumerate(batches):
            items = count_items(self._trainer, batch)
            row[0, slot] = 0 if not members[slot] else len(members[slot]) if items is None else items
            row[1, slot] = media_flags(batch)
        row[2, : len(self._previous_forward_s)] = self._previous_forward_s
        mine = np.concatenate([[planned.checksum, self.planner.next_unplanned], row.ravel()])
        tensor = torch.from_numpy(mine).to(device)
        rows = self._trainer.accelerator.gather(tensor).cpu().numpy().reshape(-1, len(mine))
        if (rows[:, 0] != rows[0, 0]).any():
            raise PlanError(
                f"all ranks must act on the same plan of step {self._position}, found the checksums "
                f"{rows[:, 0].astype(int).tolist()}. Give every rank the same seed, data and shapes."
            )
        by_slot = rows[:, 2:].reshape(len(rows), 3, capacity)
        return _Report(
            rows[:, 0], rows[:, 1], by_slot[:, 0, :num_slots], by_slot[:, 1, :num_slots], by_slot[:, 2]
        )

    def _calibrate(self, report: _Report) -> None:
        if self._calibration is None or self._previous is None:
            return
        num_slots = self._previous.plan.num_microbatches
        step = self._previous.step
        flat = step.sizes(self._previous.found.bins)
        shaped = MicrobatchSizes(
            *(
                getattr(flat, field.name).reshape(step.num_ranks, num_slots).T
                for field in dataclasses.fields(flat)
            )
        )
        cost = self._calibration.add(shaped, report.forward_s[:, :num_slots].T)
        if cost is not None:
            first = int(report.next_unplanned.max())
            self.planner.timeline.add(first, cost)
            logger.info("microbatch costs measured, used from step %d on: %s", first, cost)
            if self._save_profile is not None and self._trainer.args.process_index == 0:
                self._save(cost)
        if cost is not None or self._calibration.has_given_up:
            self._calibration = None
            if self._timer is not None:
                self._timer.remove()
                self._timer, self._previous_forward_s = None, np.zeros(0)

    def _save(self, cost: MicrobatchCost) -> None:
        """Write measured costs; a full or missing disk must not end a run whose other ranks go on."""
        try:
            cost.save(str(self._save_profile))
        except OSError as error:
            logger.warning("save_profile must be a writable path, the costs are not kept: %s", error)

    def _loss_factors(self, report: _Report) -> list[float]:
        """Weights of this rank's mean losses under the Trainer's mean over microbatches and ranks."""
        total = float(report.items.sum())
        mine = report.items[self.sampler.rank]
        return [float(items) * report.items.size / max(1.0, total) for items in mine]
