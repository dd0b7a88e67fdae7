"""The pipeline module: layers from plans, cut into stages at given boundaries."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.cost.model import LayerCostModel
from dflop_ds.errors import ConfigError
from dflop_ds.models.layers import LayerPlan, PipelineLayer
from dflop_ds.runtime import compat
from dflop_ds.runtime.finetune import Finetuning, apply
from dflop_ds.runtime.loss import packed_loss

logger = logging.getLogger(__name__)


class _PlannedLayer(LayerSpec):
    """A layer that its plan builds, so that its weights come from its own seed."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(PipelineLayer)
        self.plan = plan

    def build(self, log: bool = False) -> nn.Module:
        return self.plan.build()

    def __repr__(self) -> str:
        return self.plan.kind


class _PlannedTiedLayer(TiedLayerSpec):
    """A planned layer that shares its module with another one."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(
            plan.tied_key, PipelineLayer, forward_fn=plan.forward_fn, tied_weight_attr=list(plan.tied_weights)
        )
        self.plan = plan

    def build(self, log: bool = False) -> nn.Module:
        return self.plan.build()

    def __repr__(self) -> str:
        return self.plan.kind


class DflopPipelineModule(PipelineModule):
    """A ``PipelineModule`` whose stages are cut where the plan says.

    Attributes
    ----------
    layer_model : LayerCostModel or None
        Predicted layer times, set by whoever split the model; the scheduler needs them.
    finetuning : Finetuning or None
        What is trained, see :meth:`finetune`; None: everything alike.

    Parameters
    ----------
    plans : sequence of LayerPlan
    num_stages : int
    boundaries : sequence of int, optional
        ``num_stages + 1`` layer indices; stage ``s`` owns ``[boundaries[s], boundaries[s + 1])``.
        ``None`` lets DeepSpeed's ``partition_method`` decide.
    partition_method : {"parameters", "uniform"}
        DeepSpeed's own rule, used when ``boundaries`` is ``None``.
    loss_fn : callable, optional
        ``loss_fn(logits, labels)``.
    **kwargs
        Passed to ``PipelineModule``.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        *,
        num_stages: int,
        boundaries: Sequence[int] | None = None,
        partition_method: str = "parameters",
        loss_fn: Any = packed_loss,
        **kwargs: Any,
    ) -> None:
        self.plans = tuple(plans)
        self.layer_model: LayerCostModel | None = None
        self.finetuning: Finetuning | None = None
        self.boundaries = None if boundaries is None else check_boundaries(boundaries, len(plans), num_stages)
        specs = [_PlannedTiedLayer(plan) if plan.tied_key else _PlannedLayer(plan) for plan in plans]
        super().__init__(
            layers=specs,
            num_stages=num_stages,
            loss_fn=loss_fn,
            partition_method=partition_method,
            dynamic_shape=True,
            **kwargs,
        )
        compat.count_in_gradient_norm(self)

    def forward(self, forward_input: Any) -> Any:
        """Run the local layers; what leaves the stage is contiguous, as sending needs it."""
        outputs = super().forward(forward_input)
        if not isinstance(outputs, tuple):
            return outputs
        return tuple(tensor.contiguous() for tensor in outputs)

    @property
    def layer_kinds(self) -> list[str]:
        """Kind of every layer of the whole model, in order."""
        return [plan.kind for plan in self.plans]

    def stage_kinds(self) -> list[list[str]]:
        """Layer kinds by stage."""
        bounds = list(self.parts)
        return [self.layer_kinds[start:stop] for start, stop in itertools.pairwise(bounds)]

    def finetune(self, finetuning: Finetuning) -> None:
        """Freeze what is not trained of the local stage, and put adapters into it; weights are loaded before.

        A stage without any trained parameter gets one of a single value that nothing reads: DeepSpeed
        builds an optimizer on every rank, and none works without parameters. Its gradient stays zero.
        """
        self.finetuning = finetuning
        apply(finetuning, self.indexed_layers())
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self.register_parameter("idle_anchor", nn.Parameter(torch.zeros(1)))
        compat.count_in_gradient_norm(self)

    def stage_training(self) -> list[list[LayerTraining]] | None:
        """What is trained of each layer, by stage; None: everything."""
        if self.finetuning is None:
            return None
        return [list(self.finetuning.layers[start:stop]) for start, stop in itertools.pairwise(self.parts)]

    def trained_up_to(self, stage: int) -> bool:
        """Whether any stage from the first to this one has a trained parameter."""
        training = self.stage_training()
        return training is None or any(
            layer.trainable_share > 0 for layers in training[: stage + 1] for layer in layers
        )

    def local_layers(self) -> list[PipelineLayer]:
        """Modules built on this rank, in order; a tied module occurs once."""
        return list(self.indexed_layers().values())

    def indexed_layers(self) -> dict[int, PipelineLayer]:
        """Modules built on this rank by the index of their first layer."""
        found: dict[int, PipelineLayer] = {}
        for index in range(self._local_start, self._local_stop):
            plan = self.plans[index]
            layer = self.tied_modules[plan.tied_key] if plan.tied_key else getattr(self, str(index))
            if not any(layer is other for other in found.values()):
                found[index] = layer
        return found

    def weight_names(self) -> dict[int, dict[str, str]]:
        """By index of each local layer, the Hugging Face name of each of its weights by local name.

        A layer that shares the module of an earlier one is left out.
        """
        names: dict[int, dict[str, str]] = {}
        shared: set[str] = set()
        for index, plan in enumerate(self.plans):
            first = plan.tied_key not in shared
            if plan.tied_key is not None:
                shared.add(plan.tied_key)
            if first and self._local_start <= index < self._local_stop:
                layer = self.tied_modules[plan.tied_key] if plan.tied_key else getattr(self, str(index))
                names[index] = {local: layer.hf_name(local) for local, _ in layer.named_parameters()}
        return names

    def _partition_layers(self, method: str = "uniform") -> None:
        if self.boundaries is None:
            super()._partition_layers(method=method)
            return
        self.parts = list(self.boundaries)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])
        if self.global_rank == 0:
            logger.info("pipeline stages own layers %s", self.parts)

    def _count_layer_params(self) -> list[int]:
        # The base class builds every layer of the model to count it; shapes are enough.
        with torch.device("meta"):
            built = [plan.build() for plan in self.plans]
        return [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in built]


def check_boundaries(boundaries: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Validate stage boundaries.

    Raises
    ------
    ConfigError
        Unless they rise from 0 to ``num_layers`` with at least one layer per stage.
    """
    bounds = [int(bound) for bound in boundaries]
    rising = all(low < high for low, high in itertools.pairwise(bounds))
    if len(bounds) != num_stages + 1 or bounds[0] != 0 or bounds[-1] != num_layers or not rising:
        raise ConfigError(
            f"stage boundaries must be {num_stages + 1} rising layer indices from 0 to {num_layers}, "
            f"found {bounds}; correct dflop.parallel.split (layers per stage must add up to {num_layers})."
        )
    return bounds
