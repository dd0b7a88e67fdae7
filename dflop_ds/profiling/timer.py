"""Runs one pipeline layer, or a chain of them, forward and backward under a clock."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dflop_ds.models.layers import LayerPlan, PipelineLayer

Loss = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]
BuiltLayer = tuple[LayerPlan, PipelineLayer]

FEWEST_REPEATS = 3
_PRECISION = 0.03
_MAD_TO_SIGMA = 1.4826
_MEDIAN_TO_MEAN_ERROR = 1.2533


def median_is_known(times_s: Sequence[float]) -> bool:
    """Whether the standard error of the median is at most 3 % of it.

    The error is estimated from the median absolute deviation, which a few disturbed repeats do not move.
    """
    if len(times_s) < FEWEST_REPEATS:
        return False
    median_s = statistics.median(times_s)
    sigma_s = _MAD_TO_SIGMA * statistics.median(abs(value - median_s) for value in times_s)
    return _MEDIAN_TO_MEAN_ERROR * sigma_s <= _PRECISION * median_s * len(times_s) ** 0.5


@dataclasses.dataclass
class Timings:
    """Repeated measurements of the same work.

    Attributes
    ----------
    forward_s, backward_s : list of float
    """

    forward_s: list[float] = dataclasses.field(default_factory=list)
    backward_s: list[float] = dataclasses.field(default_factory=list)

    def totals_s(self) -> list[float]:
        """Forward plus backward seconds of every repeat."""
        return [sum(pair) for pair in zip(self.forward_s, self.backward_s, strict=True)]


class LayerTimer:
    """Times layers under the setting of training.

    On CUDA the clock is synchronised. On the CPU with one computing thread it is the CPU time of that
    thread: what other processes take away from it is not counted. With more threads, or where other
    ranks compute a share of the layer, it is wall time.

    Parameters
    ----------
    device : torch.device
    activation_checkpointing : bool
        Backward then includes the second forward.
    loss_fn : callable
        Runs after the last layer of the model.
    alone : bool
        False: other ranks compute a share of every layer, and waiting for them counts.
    """

    def __init__(
        self, device: torch.device, activation_checkpointing: bool, loss_fn: Loss, *, alone: bool = True
    ) -> None:
        self.device = device
        self.activation_checkpointing = activation_checkpointing
        self.loss_fn = loss_fn
        one_thread = alone and device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if one_thread else time.perf_counter

    def run(
        self,
        layers: Sequence[BuiltLayer],
        hidden: torch.Tensor,
        vector: torch.Tensor,
        labels: tuple[torch.Tensor, ...],
        timings: Timings,
    ) -> torch.Tensor:
        """Run a chain of layers once forward and backward, record the times, return its output, detached."""
        leaf = hidden.detach().requires_grad_(layers[0][0].kind != "vision_embed")
        for _, layer in layers:
            layer.zero_grad(set_to_none=True)
        start_s = self._now()
        output, scored = self._forward(layers, leaf, vector, labels)
        middle_s = self._now()
        gradient = torch.ones_like(scored)
        begin_s = self._now()
        scored.backward(gradient)
        timings.backward_s.append(self._now() - begin_s)
        timings.forward_s.append(middle_s - start_s)
        return output.detach()

    def activation_bytes(
        self,
        layer: BuiltLayer,
        hidden: torch.Tensor,
        vector: torch.Tensor,
        labels: tuple[torch.Tensor, ...],
    ) -> int:
        """What one layer keeps from forward to backward without activation checkpointing.

        On CUDA, what the allocator has handed out more after the forward pass than before it, and the
        input of the layer; on the CPU, the bytes of the distinct tensors that autograd saves, without
        parameters.
        """
        leaf = hidden.detach().requires_grad_(layer[0].kind != "vision_embed")
        with SavedBytes([layer[1]]) as saved:
            before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
            kept = self._forward([layer], leaf, vector, labels, checkpointing=False)
            if self.device.type == "cuda":
                growth = torch.cuda.memory_allocated(self.device) - before
                del kept
                return max(0, growth) + leaf.untyped_storage().nbytes()
        return saved.total_bytes

    def _forward(
        self,
        layers: Sequence[BuiltLayer],
        leaf: torch.Tensor,
        vector: torch.Tensor,
        labels: tuple[torch.Tensor, ...],
        checkpointing: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the chain, and what its backward pass starts from."""
        hidden: Any = leaf
        for plan, layer in layers:
            forward = _forward_of(plan, layer, vector)
            if self.activation_checkpointing if checkpointing is None else checkpointing:
                result = checkpoint(forward, hidden, use_reentrant=False)
            else:
                result = forward(hidden)
            last = not isinstance(result, tuple)
            hidden = result if last else result[0]
        return hidden, self.loss_fn(hidden, labels) if last else hidden

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()


class SavedBytes:
    """Context that counts the bytes of the distinct tensors which autograd saves inside it.

    Parameters
    ----------
    modules : sequence of Module
        Their parameters are not counted.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._known = {_storage(p).data_ptr() for module in modules for p in module.parameters()}
        # The storages are held: a freed one could lend its address to another tensor.
        self._storages: list[Any] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.total_bytes = 0

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        self._storages.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._storages.append(storage)
            self.total_bytes += storage.nbytes()
        return tensor


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Memory of a tensor; of one that is cut over ranks, this rank's share."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _forward_of(plan: LayerPlan, layer: PipelineLayer, vector: torch.Tensor) -> Callable[[Any], Any]:
    def forward(hidden: torch.Tensor) -> Any:
        carry = (hidden, vector)
        return layer(carry) if plan.forward_fn is None else plan.forward_fn(layer, carry)

    return forward
