"""DeepSpeed's pipeline engine, run by data-aware plans."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from dflop_ds.config import DflopConfig
from dflop_ds.data.layout import PackedLayout
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.data.stream import StreamRecords
from dflop_ds.errors import PlanError
from dflop_ds.runtime import checkpoint, compat
from dflop_ds.runtime.adaptive import AdaptivePlanner
from dflop_ds.runtime.dataloader import DflopDataLoader
from dflop_ds.runtime.evaluation import evaluate
from dflop_ds.runtime.feed import PlanFeed
from dflop_ds.runtime.report import PlanLog, forget_other_ranks, open_rank_log
from dflop_ds.runtime.telemetry import Telemetry
from dflop_ds.scheduling.plan_log import rank_log
from dflop_ds.scheduling.planner import PlannedStep, StepPlanner
from dflop_ds.scheduling.windows import StreamPlanner

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DataPlan:
    """What the engine needs to draw data-aware batches.

    Attributes
    ----------
    config : DflopConfig
    planner : StepPlanner
        The same on every rank; rank 0 alone solves with it.
    records : StreamRecords or None
        Where the data are a stream; its planner is a ``StreamPlanner``.
    """

    config: DflopConfig
    planner: StepPlanner | StreamPlanner
    records: StreamRecords | None = None


class DflopPipelineEngine(PipelineEngine):
    """A ``PipelineEngine`` whose microbatches follow a plan.

    The way of one step: :meth:`train_batch` takes the step's plan from the feed (the same on
    every rank), sets the number of microbatches, tells the loader what to expect, and lets
    DeepSpeed run its 1F1B instruction stream. Overridden are loading (keeps the tag of the samples), the
    forward pass (the last stage checks that the activations it got belong to the labels it loaded), the
    backward pass (one autograd call per microbatch), the reduction (parameters that had nothing to do
    take part with a zero gradient) and the messages: where nothing below is trained, no gradient is
    computed or sent.

    Parameters
    ----------
    data_plan : DataPlan, optional
        ``None`` when no training data was given to ``initialize``.
    """

    data_iterator: Any
    training_dataloader: Any

    def __init__(self, *args: Any, data_plan: DataPlan | None = None, **kwargs: Any) -> None:
        self.data_plan = data_plan
        self.feed: PlanFeed | None = None
        self._log: PlanLog | None = None
        self.adaptive: AdaptivePlanner | None = None
        self._loader: DflopDataLoader | None = None
        self._label_tags: dict[int, torch.Tensor] = {}
        super().__init__(*args, **kwargs)
        self.telemetry = Telemetry.attach(self) if self._wants_telemetry() else None

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Run one optimizer step; same contract as DeepSpeed's ``train_batch``.

        Parameters
        ----------
        data_iter : iterator, optional
            Microbatches of your own, as ``PackedCollator`` makes them, in your own order; the
            planner is then not consulted. ``gradient_accumulation_steps()`` of them are drawn.

        Returns
        -------
        Tensor
            Mean loss over the supervised tokens (or samples) of the global batch.
        """
        if data_iter is not None:
            planned, loader = self.data_iterator, self.training_dataloader
            try:
                return self._timed_step(self._as_one_mean(data_iter))
            finally:
                self.data_iterator, self.training_dataloader = planned, loader
        if self.feed is None:
            return self._timed_step(None)
        plan = self.feed.next_step()
        compat.set_num_microbatches(self, plan.num_microbatches)
        if self._loader is not None:
            self._loader.expect(plan.replica_bins(self.feed.replica), plan.loss_scale)
        loss = self._timed_step(None)
        if self._log is not None and self.telemetry is not None:
            self._log.append_measured(
                plan.step, self.telemetry.steps[-1], stage=self.stage_id, replica=self.feed.replica
            )
        if self.adaptive is not None and self.telemetry is not None:
            self.adaptive.after_step(plan, self.telemetry.steps[-1])
        self.feed.advance()
        return loss

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as DeepSpeed does, with the position in the data; complete or not there at all."""
        return checkpoint.save(
            self,
            super().save_checkpoint,
            Path(save_dir),
            f"global_step{self.global_steps}" if tag is None else str(tag),
            save_latest=save_latest,
            client_state=dict(client_state or {}),
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load as DeepSpeed does, for any number of stages and replicas, and go on where the run was.

        With ``load_module_only`` the position in the data stays what it is.
        """
        return checkpoint.load(
            self,
            super().load_checkpoint,
            Path(load_dir),
            None if tag is None else str(tag),
            weights_only=load_module_only,
            with_optimizer=load_optimizer_states,
            load_module_strict=load_module_strict,
            load_lr_scheduler_states=load_lr_scheduler_states,
            custom_load_fn=custom_load_fn,
        )

    def restart_after(self, num_steps: int) -> None:
        """Drop what is loaded ahead, and go on with the plan log; the feed stands where a checkpoint was."""
        if self._loader is not None:
            self._loader.restart()
        if self._log is not None and self.feed is not None:
            self._log.keep(num_planned=num_steps + len(self.feed.plans), num_measured=num_steps)

    def request_stop(self) -> None:
        """Ask for :attr:`stopping` after the running step; on any rank, also in a signal handler."""
        if self.feed is not None:
            self.feed.stop.request()

    @property
    def stopping(self) -> bool:
        """Whether training should end now: some rank asked for it; the same on all ranks after a step."""
        return self.feed is not None and self.feed.stopping

    def evaluate(self, dataset: ProbedDataset, max_batches: int | None = None) -> float:
        """Mean loss over a data set; may be called between training steps.

        Where an end is asked for meanwhile (:attr:`stopping`), the rest of the data set is left out.

        Parameters
        ----------
        dataset : ProbedDataset
            As for training; all ranks must pass the same one.
        max_batches : int, optional
            Global batches to evaluate; all by default.
        """
        return evaluate(self, dataset, max_batches=max_batches)

    def destroy(self) -> None:
        """Stop the planner and the data workers, and release DeepSpeed's resources."""
        if self.feed is not None:
            self.feed.close()
        if self._loader is not None:
            self._loader.close()
        super().destroy()

    def _open_log(
        self, planner: StepPlanner | StreamPlanner, path: str | None
    ) -> Callable[[PlannedStep], None] | None:
        if path is None:
            return None
        own = rank_log(Path(path), self.global_rank)
        if self.global_rank != 0:
            self._log = open_rank_log(own)
            return None
        forget_other_ranks(own, self.world_size)
        if isinstance(planner, StreamPlanner):
            self._log = PlanLog(own, planner.names)
        else:
            names = dict(zip(planner.rows.tolist(), planner.table.sample_ids, strict=True))
            self._log = PlanLog(own, names)
        return self._log.append

    def _wants_telemetry(self) -> bool:
        return self.data_plan is not None and self.data_plan.config.telemetry.enabled

    def _timed_step(self, data_iter: Any) -> torch.Tensor:
        telemetry = self.telemetry
        if telemetry is None:
            return super().train_batch(data_iter)
        with telemetry.step():
            return super().train_batch(data_iter)

    def _as_one_mean(self, data_iter: Iterator[Any]) -> Iterator[Any]:
        """The step's microbatches with weights that make DeepSpeed's mean the mean over all of them."""
        ends = self.is_first_stage() or self.is_last_stage()
        batches = [next(data_iter) for _ in range(self.micro_batches)] if ends else []
        if not self.is_last_stage():
            return iter(batches)
        total = sum(
            (weights.double().sum() for _, (_, weights, _) in batches), torch.zeros((), dtype=torch.float64)
        )
        total = total.to(self.device)
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        scale = self.micro_batches * self.dp_world_size / max(float(total), 1e-12)
        return iter(
            [(inputs, (targets, weights * scale, tag)) for inputs, (targets, weights, tag) in batches]
        )

    def _build_data_iter(self, dataset: ProbedDataset) -> None:
        # initialize() has checked the kind of data set and that there is a collator.
        if self.data_plan is None:
            super()._build_data_iter(dataset)
            return
        config, planner = self.data_plan.config, self.data_plan.planner
        replica = self.grid.get_data_parallel_rank()
        loads = self.is_first_stage() or self.is_last_stage()
        if isinstance(planner, StepPlanner) and config.cost.adaptive:
            self.adaptive = AdaptivePlanner(planner, self.stage_id, replica, self.num_stages)
        self.feed = PlanFeed(
            self.adaptive or planner,
            lookahead=config.scheduler.lookahead,
            deadline_s=config.scheduler.deadline_s,
            replica=replica,
            on_plan=self._open_log(planner, config.telemetry.plan_log),
            in_process=config.scheduler.solver == "process",
            records=self.data_plan.records if loads else None,
        )
        if not loads:
            return
        self._loader = DflopDataLoader(
            dataset if self.is_first_stage() else dataset.without_media(),
            feed=self.feed,
            collate_fn=self.collate_fn,
            num_microbatches=self.micro_batches,
            num_planned=planner.fewest_microbatches(config.scheduler.lookahead),
            num_workers=config.data.num_workers,
            pin_memory=self.device.type == "cuda",
            steps_per_epoch=planner.order.steps_per_epoch,
            tput_timer=self.tput_timer,
            local_rank=self.local_rank,
        )
        self.set_dataloader(self._loader)

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        super()._exec_load_micro_batch(buffer_id)
        if self.is_last_stage():
            self._label_tags[buffer_id] = self.pipe_buffers["labels"][buffer_id][-1]
        if self.is_first_stage():
            # Reentrant checkpointing asks for the gradient of the media values, which nobody needs.
            self._without_gradient(buffer_id)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage() and not self.is_first_stage():
            self._check_tag(buffer_id)
        super()._exec_forward_pass(buffer_id)
        if self.is_last_stage():
            # Backward starts from the loss; the logits would stay until the buffer is used again.
            compat.release_outputs(self, buffer_id)

    def _check_tag(self, buffer_id: int) -> None:
        layout = PackedLayout.decode(self.pipe_buffers["inputs"][buffer_id][-1])
        loaded = int(self._label_tags[buffer_id].item())
        if layout.tag != loaded:
            raise PlanError(
                f"the last stage must label the samples that the first stage sent (tag {layout.tag}), "
                f"found labels with tag {loaded} on rank {self.global_rank}; both stages must draw "
                f"from the same plan."
            )

    def _exec_recv_activations(self, buffer_id: int) -> None:
        super()._exec_recv_activations(buffer_id)
        if not self.module.trained_up_to(self.stage_id - 1):
            self._without_gradient(buffer_id)

    def _exec_send_grads(self, buffer_id: int) -> None:
        if self.module.trained_up_to(self.stage_id - 1):
            super()._exec_send_grads(buffer_id)
        else:
            self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        if self.module.trained_up_to(self.stage_id):
            super()._exec_recv_grads(buffer_id)

    def _without_gradient(self, buffer_id: int) -> None:
        for tensor in self.pipe_buffers["inputs"][buffer_id]:
            tensor.requires_grad_(False)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            # A microbatch of text has no gradient where the encoder alone is trained.
            if self.loss.requires_grad:
                super()._exec_backward_pass(buffer_id)
            return
        if self.module.trained_up_to(self.stage_id):
            outputs = self.pipe_buffers["outputs"][buffer_id]
            floats = [t for t in outputs if t.is_floating_point()]
            pairs = zip(floats, compat.received_gradients(self), strict=True)
            wanted = [(out, grad) for out, grad in pairs if out.requires_grad]
            if wanted:
                compat.backward_once(self, [out for out, _ in wanted], [grad for _, grad in wanted])
        compat.release_outputs(self, buffer_id)

    def _exec_reduce_grads(self) -> None:
        compat.fill_missing_gradients(self)
        super()._exec_reduce_grads()


DflopPipelineEngine._INSTRUCTION_MAP = compat.overridden_instructions(DflopPipelineEngine)
