"""Stages of every possible depth: which layers they hold, in counts per layer kind."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Literal

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray
from dflop_ds.cost.split import balanced_split
from dflop_ds.planning.layout import Layout
from dflop_ds.planning.workload import Workload

IntArray = npt.NDArray[np.int64]
SplitRule = Literal["parameters", "uniform"]
SPLIT_RULES: tuple[SplitRule, ...] = ("parameters", "uniform")
"""Partition methods of DeepSpeed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of layers that is cut into stages as a whole.

    Attributes
    ----------
    first, last : int
        Layers ``first`` to ``last - 1`` of the model.
    """

    first: int
    last: int


class StageTable:
    """Splits of the model, of its encoder and of its LLM into stages, balanced by predicted time.

    A split depends on the depth and on checkpointing only: its layer times are means over the drawn batches
    without tensor parallelism, at the square root of the batch size in bins, which changes nothing but the
    share of the launch overhead.

    Parameters
    ----------
    workload : Workload
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.parameters = np.array(
            [workload.model.memory.parameters[kind] for kind in workload.kinds], dtype=np.float64
        )
        shares = [workload.training[kind].trainable_share for kind in workload.kinds]
        self.trained = self.parameters * np.array(shares)

    def part(self, name: str) -> Part:
        """Layers of "all", "encoder" or "llm"."""
        total, cut = len(self.workload.layers), self.workload.encoder_layers
        return {"all": Part(0, total), "encoder": Part(0, cut), "llm": Part(cut, total)}[name]

    def num_layers(self, name: str) -> int:
        """Layers of a part."""
        part = self.part(name)
        return part.last - part.first

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the search that holds it
    def sizes(self, name: str, num_stages: int, checkpointing: bool) -> tuple[int, ...]:
        """Layers of each stage, first stage first."""
        part = self.part(name)
        kinds = self.workload.layers[part.first : part.last]
        times_s = self._layer_times_s(checkpointing)[part.first : part.last]
        edges = balanced_split(kinds, times_s, num_stages)
        return tuple(np.diff(edges).tolist())

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - as above
    def counts(self, name: str, num_stages: int, checkpointing: bool) -> IntArray:
        """Layers of each kind in each stage, shape (num_stages, num_kinds)."""
        start = self.part(name).first
        edges = start + np.cumsum([0, *self.sizes(name, num_stages, checkpointing)])
        return self.count_between(edges)

    def count_between(self, edges: IntArray) -> IntArray:
        """Layers of each kind between consecutive edges, shape (len(edges) - 1, num_kinds)."""
        order = {kind: index for index, kind in enumerate(self.workload.kinds)}
        counts = np.zeros((len(edges) - 1, len(order)), dtype=np.int64)
        for stage in range(len(edges) - 1):
            for layer in self.workload.layers[edges[stage] : edges[stage + 1]]:
                counts[stage, order[layer]] += 1
        return counts

    def layout_sizes(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each stage of a layout."""
        checkpointing = layout.activation_checkpointing
        if layout.encoder is None:
            return self.sizes("all", layout.llm.pipeline, checkpointing)
        encoder = self.sizes("encoder", layout.encoder.pipeline, checkpointing)
        return encoder + self.sizes("llm", layout.llm.pipeline, checkpointing)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as above
    def _layer_times_s(self, checkpointing: bool) -> FloatArray:
        workload = self.workload
        num_bins = max(1, round(workload.batch_size**0.5))
        totals = workload.layer_totals(np.array([1]), checkpointing, np.array([num_bins]))[0]
        order = {kind: index for index, kind in enumerate(workload.kinds)}
        return np.array([totals[order[kind]] for kind in workload.layers])


def split_by_rule(stages: StageTable, num_stages: int, rule: SplitRule) -> tuple[int, ...]:
    """Layers of each stage as DeepSpeed's partition methods ``parameters`` and ``uniform`` cut them."""
    layers = stages.workload.layers
    if rule == "uniform":
        return tuple(len(part) for part in np.array_split(np.arange(len(layers)), num_stages))
    counts = stages.workload.model.memory.parameters
    edges = balanced_split(layers, [float(counts[kind]) for kind in layers], num_stages)
    return tuple(after - before for before, after in itertools.pairwise(edges))
