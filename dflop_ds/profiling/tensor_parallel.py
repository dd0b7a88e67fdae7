"""Layers cut over the ranks of a tensor-parallel group, so that their share can be timed.

The cut is that of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the first product of
attention and of the MLP is divided by columns, the second by rows, so that each needs one all-reduce in
forward and one in backward. The vocabulary projection is divided by columns and its logits are gathered.
Norms, embeddings and the projector are computed by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dflop_ds.errors import ConfigError

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
_ROWS = ("o_proj", "out_proj", "down_proj", "fc2")
_GATHERED = ("lm_head",)


class Group(Protocol):
    """How the ranks that time a layer together are kept in step.

    Attributes
    ----------
    size : int
        Ranks.
    is_first : bool
        Whether this is the rank whose times count and that writes files.
    """

    size: int
    is_first: bool

    def shard(self, layer: nn.Module) -> nn.Module:
        """Cut a layer; every rank keeps its share."""

    def agree(self, decisions: Sequence[bool]) -> list[bool]:
        """The decisions of the first rank, on every rank."""


class OneRank:
    """A group of one: nothing is cut, and every decision is its own."""

    size = 1
    is_first = True

    def shard(self, layer: nn.Module) -> nn.Module:
        """The layer as it is."""
        return layer

    def agree(self, decisions: Sequence[bool]) -> list[bool]:
        """The decisions as they are."""
        return list(decisions)


class TensorParallelGroup:
    """All ranks of the default process group as one tensor-parallel group.

    Parameters
    ----------
    device : torch.device
        Of this rank.
    head_counts : sequence of int
        Numbers of attention heads (query, key-value, encoder) that must be divisible.

    Raises
    ------
    ConfigError
        If a number of heads is not a multiple of the number of ranks.
    """

    def __init__(self, device: torch.device, head_counts: Sequence[int]) -> None:
        self.size = dist.get_world_size()
        self.is_first = dist.get_rank() == 0
        odd = [count for count in head_counts if count % self.size]
        if odd:
            raise ConfigError(
                f"a tensor-parallel degree must divide every number of attention heads, found {odd} heads "
                f"for {self.size} ranks; start fewer ranks."
            )
        self._device = device
        self._mesh = DeviceMesh(device.type, list(range(self.size)))

    def shard(self, layer: nn.Module) -> nn.Module:
        """Cut the products of a layer; what is computed as a whole stays the same on every rank.

        Raises
        ------
        ConfigError
            If a layer cuts only one half of a pair of products, because the other has an unknown name.
        """
        plan: dict[str, Any] = {}
        for name, module in layer.named_modules():
            leaf = name.rpartition(".")[2]
            if not isinstance(module, nn.Linear):
                continue
            if leaf in _COLUMNS:
                plan[name] = ColwiseParallel()
            elif leaf in _ROWS:
                plan[name] = RowwiseParallel()
            elif leaf in _GATHERED:
                plan[name] = ColwiseParallel(output_layouts=Replicate())
        kinds = {type(style) for name, style in plan.items() if name.rpartition(".")[2] not in _GATHERED}
        if len(kinds) == 1:
            raise ConfigError(
                f"a layer must be cut by columns and then by rows, found only {sorted(plan)} in "
                f"{type(layer).__name__}; profile this model with one rank."
            )
        return parallelize_module(layer, self._mesh, plan) if plan else layer

    def agree(self, decisions: Sequence[bool]) -> list[bool]:
        """The decisions of rank 0: measured times differ, and all ranks must repeat a layer alike."""
        flags = torch.tensor(list(decisions), dtype=torch.uint8, device=self._device)
        dist.broadcast(flags, src=0)
        return [bool(flag) for flag in flags.tolist()]
