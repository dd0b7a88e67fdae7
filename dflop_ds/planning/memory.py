"""Bytes per GPU of every stage of a layout, by the memory model, with tensor parallelism.

Tensor parallelism divides weights and their state; of the activations of a block it divides the inner ones,
of 34 bytes per value of the residual stream 24, and leaves the 10 at the borders of the block (Korthikanti
et al. 2022, arXiv 2205.05198, equation 2).
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.memory import StageMemory, TrainingSetting
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.planning.workload import Workload

_REPLICATED = 10.0 / 34.0


@dataclasses.dataclass(frozen=True)
class ModuleBins:
    """Sizes of the microbatches of a module and of the LLM.

    Attributes
    ----------
    encoder, llm : MicrobatchFeatures
        What one replica of each processes at a time.
    """

    encoder: MicrobatchFeatures
    llm: MicrobatchFeatures


def stage_memories(
    workload: Workload, layout: Layout, sizes: tuple[int, ...], bins: ModuleBins
) -> list[StageMemory]:
    """Peak bytes of one GPU of every stage.

    Parameters
    ----------
    workload : Workload
    layout : Layout
    sizes : tuple of int
        Layers of each stage.
    bins : ModuleBins
        Microbatches; the largest ones are assumed to be in flight.
    """
    edges = [0, *itertools.accumulate(sizes)]
    stages = [workload.layers[a:b] for a, b in itertools.pairwise(edges)]
    memories = []
    for index, degrees in enumerate(layout.stage_degrees):
        setting = TrainingSetting(
            workload.model.value_bytes,
            degrees.data,
            layout.zero_stage,
            layout.activation_checkpointing,
            workload.model.reduce_bucket_values,
        )
        features = bins.encoder if degrees is layout.encoder else bins.llm
        if layout.num_microbatches < len(stages) - index:
            features = _largest(features, layout.num_microbatches)
        training = [workload.training[kind] for kind in stages[index]]
        whole = workload.model.memory.stage(stages, index, features, setting, training)
        memories.append(_divided(whole, degrees, layout.activation_checkpointing))
    return memories


def _largest(features: MicrobatchFeatures, count: int) -> MicrobatchFeatures:
    """As many microbatches as one replica has, each size the largest there are: no less than any of them."""
    columns = [
        -np.sort(-getattr(features, field.name))[:count] for field in dataclasses.fields(MicrobatchFeatures)
    ]
    return MicrobatchFeatures(*columns)


def inner_share(tensor: npt.NDArray[np.int64]) -> FloatArray:
    """Share of a block's activations that one rank of a tensor-parallel group keeps."""
    return np.asarray(_REPLICATED + (1.0 - _REPLICATED) / tensor)


def _divided(memory: StageMemory, degrees: Degrees, checkpointing: bool) -> StageMemory:
    tensor = degrees.tensor
    if tensor == 1:
        return memory
    inner = float(inner_share(np.array(tensor)))
    return StageMemory(
        parameters_bytes=memory.parameters_bytes / tensor,
        gradients_bytes=memory.gradients_bytes / tensor,
        optimizer_bytes=memory.optimizer_bytes / tensor,
        # With checkpointing only the inputs of layers are kept, which every rank holds whole.
        activations_bytes=memory.activations_bytes * (1.0 if checkpointing else inner),
        recompute_bytes=memory.recompute_bytes * inner,
        backward_bytes=memory.backward_bytes * inner,
        logits_bytes=memory.logits_bytes / tensor,
        communication_bytes=memory.communication_bytes,
    )


def total_bytes(memories: list[StageMemory]) -> FloatArray:
    """Bytes of every stage."""
    return np.array([memory.total_bytes for memory in memories])
