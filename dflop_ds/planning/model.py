"""What is known of the model before it is trained: its layers, their costs, and what of them is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dflop_ds.cost.gradients import LayerTraining
from dflop_ds.cost.layer_model import LayerCostModel
from dflop_ds.cost.memory import MemoryModel


@dataclasses.dataclass(frozen=True, eq=False)
class ModelCosts:
    """Layers of a model with their times and bytes.

    Attributes
    ----------
    layers : tuple of str
        Kind of every layer, in pipeline order.
    times : LayerCostModel
        Of one GPU.
    memory : MemoryModel
    value_bytes : int
        Of the type that trains: 2 for bf16, 4 for fp32.
    reduce_bucket_values : int
        DeepSpeed's ``zero_optimization.reduce_bucket_size``, which ZeRO-1 allocates in fp32.
    profiled_checkpointing : bool
        Whether the backward passes of `times` contain a second forward pass.
    measured : bool
        Whether `times` was fitted to measurements.
    training : tuple of LayerTraining or None
        What is trained of each layer; None: everything.
    tensor_times : mapping of int to LayerCostModel
        Measured shares of a layer, by tensor-parallel degree; other degrees are derived.
    """

    layers: tuple[str, ...]
    times: LayerCostModel
    memory: MemoryModel
    value_bytes: int = 2
    reduce_bucket_values: int = 500_000_000
    profiled_checkpointing: bool = False
    measured: bool = True
    training: tuple[LayerTraining, ...] | None = None
    tensor_times: Mapping[int, LayerCostModel] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Layer kinds in the order of their first layer."""
        return tuple(dict.fromkeys(self.layers))

    def training_of(self, layer: int) -> LayerTraining:
        """What is trained of a layer."""
        return LayerTraining() if self.training is None else self.training[layer]

    def training_by_kind(self) -> dict[str, LayerTraining]:
        """Layers of one kind taken alike, with the mean share of trained parameters."""
        found = {}
        for kind in self.kinds:
            own = [self.training_of(layer) for layer, name in enumerate(self.layers) if name == kind]
            share = sum(state.trainable_share for state in own) / len(own)
            found[kind] = LayerTraining(share, any(state.trainable_below for state in own))
        return found
