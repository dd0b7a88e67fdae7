"""Times the layers of a model on the device at hand, at shapes of the data at hand."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from dflop_ds.cost.features import ENCODER_KINDS, MicrobatchFeatures, ProfileRow
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.models.layers import LayerPlan, PipelineLayer

logger = logging.getLogger(__name__)

Loss = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]

_REPEATS = 3
_FEWEST_SHAPES = 8


def choose_microbatches(num_rows: int, samples_per_bin: int, num_shapes: int, seed: int) -> list[list[int]]:
    """Microbatches to time: random samples in bins of one up to twice the usual size.

    Samples may repeat inside a bin, so that even a data set of one sample gives several sizes.

    Returns
    -------
    list of list of int
        Rows of the shape table; both ends of the range come first, and any longer prefix covers it.
    """
    rng = np.random.default_rng(seed)
    largest = max(2, 2 * samples_per_bin)
    spread = [1 + int(_spread(index) * largest) for index in range(1, num_shapes)]
    sizes = [1, largest, *spread][:num_shapes]
    return [rng.integers(num_rows, size=size).tolist() for size in sizes]


def _spread(index: int) -> float:
    """Van der Corput's sequence in [0, 1): the bits of ``index`` mirrored at the point."""
    value, weight = 0.0, 0.5
    while index:
        value, weight, index = value + weight * (index & 1), weight / 2, index >> 1
    return value


def profile_layers(
    plans: Sequence[LayerPlan],
    probed: ProbedDataset,
    microbatches: Sequence[Sequence[int]],
    *,
    collate_fn: Callable[[list[Any]], Any],
    loss_fn: Loss,
    device: torch.device,
    dtype: torch.dtype,
    activation_checkpointing: bool = False,
    budget_s: float = 30.0,
) -> list[ProfileRow]:
    """Forward and backward seconds of one layer of every kind on each microbatch.

    Only headers are read: pixels are random, since their values do not change the time.

    Parameters
    ----------
    plans : sequence of LayerPlan
        Of the whole model; one layer of each kind is built.
    probed : ProbedDataset
    microbatches : sequence of sequences of int
        Rows of ``probed.table``.
    collate_fn, loss_fn : callable
        As in training; the loss is timed with the head.
    device, dtype : torch.device, torch.dtype
    activation_checkpointing : bool
        Backward then includes the second forward, as in training.
    budget_s : float
        Stop after this many seconds, but not before 8 microbatches and two sizes of every layer kind.
    """
    layers = _one_of_each_kind(plans, device, dtype)
    timer = _LayerTimer(device, activation_checkpointing, loss_fn)
    light = probed.without_pixels()
    rows: list[ProfileRow] = []
    start_s = time.perf_counter()
    for number, members in enumerate(
        tqdm(microbatches, desc="profiling layers", unit="shape", disable=not sys.stderr.isatty())
    ):
        over = time.perf_counter() - start_s > budget_s
        if over and number >= _FEWEST_SHAPES and _can_be_fitted(rows):
            logger.info("profiled %d of %d shapes within %.0f s", number, len(microbatches), budget_s)
            break
        samples = [light[int(probed.rows[row])] for row in members]
        rows += _profile_one(layers, timer, collate_fn(samples), probed, members, device, dtype)
    return rows


def _can_be_fitted(rows: Sequence[ProfileRow]) -> bool:
    """Whether every layer kind was timed at two sizes; rare media may take some microbatches to occur."""
    sizes: dict[str, set[tuple[int, int]]] = {}
    for row in rows:
        sizes.setdefault(row.kind, set()).add((row.encoder_inputs, row.llm_tokens))
    return all(len({size[0] for size in sizes[kind]}) > 1 for kind in ENCODER_KINDS if kind in sizes) and all(
        len({size[1] for size in sizes[kind]}) > 1 for kind in sizes if kind not in ENCODER_KINDS
    )


def _one_of_each_kind(
    plans: Sequence[LayerPlan], device: torch.device, dtype: torch.dtype
) -> list[tuple[LayerPlan, PipelineLayer]]:
    first: dict[str, LayerPlan] = {}
    for plan in plans:
        first.setdefault(plan.kind, plan)
    return [(plan, plan.build().to(device=device, dtype=dtype)) for plan in first.values()]


def _profile_one(
    layers: Sequence[tuple[LayerPlan, PipelineLayer]],
    timer: _LayerTimer,
    batch: Any,
    probed: ProbedDataset,
    members: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> list[ProfileRow]:
    (pixels, vector), labels = batch
    sizes = MicrobatchFeatures.from_bins(probed.table, [list(members)])
    num_inputs = int(sizes.encoder_inputs[0])
    hidden = torch.randn(num_inputs, *pixels.shape[1:]).to(device, dtype)
    vector, labels = vector.to(device), tuple(label.to(device) for label in labels)
    rows = []
    for plan, layer in layers:
        outputs, forward_s, backward_s = timer.measure(plan, layer, hidden, vector, labels)
        if num_inputs or plan.kind not in ENCODER_KINDS:
            rows.append(
                ProfileRow(
                    kind=plan.kind,
                    encoder_inputs=num_inputs,
                    media_tokens=int(sizes.media_tokens[0]),
                    llm_tokens=int(sizes.llm_tokens[0]),
                    sum_squared_tokens=int(sizes.sum_squared_tokens[0]),
                    num_segments=int(sizes.num_segments[0]),
                    target_tokens=int(sizes.target_tokens[0]),
                    forward_s=forward_s,
                    backward_s=backward_s,
                )
            )
        hidden = outputs
    return rows


class _LayerTimer:
    """Runs one layer forward and backward and tells the median times."""

    def __init__(self, device: torch.device, activation_checkpointing: bool, loss_fn: Loss) -> None:
        self.device = device
        self.activation_checkpointing = activation_checkpointing
        self.loss_fn = loss_fn

    def measure(
        self,
        plan: LayerPlan,
        layer: PipelineLayer,
        hidden: torch.Tensor,
        vector: torch.Tensor,
        labels: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, float, float]:
        """Output of the layer, detached, and its forward and backward seconds."""
        leaf = hidden.detach().requires_grad_(plan.kind != "vision_embed")
        gradient: torch.Tensor | None = None
        forward_times, backward_times = [], []
        for _ in range(1 + _REPEATS):
            layer.zero_grad(set_to_none=True)
            leaf.grad = None
            start_s = self._now()
            result = self._run(plan, layer, leaf, vector)
            output = result[0] if isinstance(result, tuple) else result
            scored = output if isinstance(result, tuple) else self.loss_fn(output, labels)
            middle_s = self._now()
            if gradient is None:
                gradient = torch.ones_like(scored)
            scored.backward(gradient)
            forward_times.append(middle_s - start_s)
            backward_times.append(self._now() - middle_s)
        # The first round pays for allocation and kernel selection.
        return output.detach(), statistics.median(forward_times[1:]), statistics.median(backward_times[1:])

    def _run(self, plan: LayerPlan, layer: PipelineLayer, leaf: torch.Tensor, vector: torch.Tensor) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            carry = (hidden, vector)
            return layer(carry) if plan.forward_fn is None else plan.forward_fn(layer, carry)

        if self.activation_checkpointing:
            return checkpoint(forward, leaf, use_reentrant=False)
        return forward(leaf)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
