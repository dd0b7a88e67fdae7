"""Times the layers of a model on the device at hand, at shapes of the data at hand."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflop_ds.cost.features import ENCODER_KINDS, MicrobatchFeatures, ProfileRow
from dflop_ds.data.layout import PackedLayout
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.models.layers import LayerPlan
from dflop_ds.profiling.partial import PartialProfile
from dflop_ds.profiling.table import ProfileLimit
from dflop_ds.profiling.tensor_parallel import Group, OneRank
from dflop_ds.profiling.timer import BuiltLayer, LayerTimer, Loss, Timings, median_is_known

logger = logging.getLogger(__name__)

_FEWEST_SHAPES = 8
_MOST_REPEATS = 9


@dataclasses.dataclass
class LayerProfile:
    """What :func:`profile_layers` measured.

    Attributes
    ----------
    rows : list of ProfileRow
    limits : list of ProfileLimit
        Microbatches for which the memory did not suffice.
    parameters : dict of str to int
        Number of parameters of one layer of each kind.
    """

    rows: list[ProfileRow] = dataclasses.field(default_factory=list)
    limits: list[ProfileLimit] = dataclasses.field(default_factory=list)
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where and how layers are timed.

    Attributes
    ----------
    probed : ProbedDataset
        Only headers are read: media values are random, since their values do not change the time.
    collate_fn : callable
        As in training.
    timer : LayerTimer
    dtype : torch.dtype
    """

    probed: ProbedDataset
    collate_fn: Callable[[list[Any]], Any]
    timer: LayerTimer
    dtype: torch.dtype

    def inputs(
        self, members: Sequence[int]
    ) -> tuple[MicrobatchFeatures, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Sizes, media values, layout and labels of a microbatch of rows of the shape table."""
        light, device = self.probed.without_media(), self.timer.device
        samples = [light[int(self.probed.rows[row])] for row in members]
        (media_values, vector), labels = self.collate_fn(samples)
        sizes = MicrobatchFeatures.from_bins(self.probed.table, [list(members)])
        num_rows = sum(PackedLayout.decode(vector).rows_per_item)
        hidden = torch.randn(num_rows, *media_values.shape[1:]).to(device, self.dtype)
        return sizes, hidden, vector.to(device), tuple(label.to(device) for label in labels)


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
    partial: Path | None = None,
    partial_key: str = "",
    group: Group | None = None,
) -> LayerProfile:
    """Forward and backward seconds of one layer of every kind on each microbatch.

    Every layer is repeated until the standard error of its median is 3 %, 9 times at most; the repeats
    of different kinds alternate, so that a layer does not find its own data in the caches.

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
    partial : Path, optional
        File that keeps finished microbatches, so that an interrupted profile goes on where it stopped.
    partial_key : str
        What the measurements depend on; a partial file of another key is not used.
    group : Group, optional
        Ranks that hold a share of every layer each; all of them must call. Times are those of the calling
        rank, waiting for the others included, and only the first rank writes the partial file.

    Returns
    -------
    LayerProfile
    """
    group = group or OneRank()
    layers = one_of_each_kind(plans, device, dtype)
    parameters = {plan.kind: _num_parameters(layer) for plan, layer in layers}
    layers = [(plan, group.shard(layer)) for plan, layer in layers]
    timer = LayerTimer(device, activation_checkpointing, loss_fn, alone=group.size == 1)
    bench = Bench(probed, collate_fn, timer, dtype)
    kept = None if partial is None else PartialProfile(partial, f"{partial_key} {list(microbatches)}")
    profile = LayerProfile(parameters=parameters)
    start_s = time.perf_counter()
    hidden = not (group.is_first and sys.stderr.isatty())
    bar = tqdm(microbatches, desc="profiling layers", unit="shape", disable=hidden)
    for number, members in enumerate(bar):
        found = None if kept is None else kept.get(number)
        if found is None:
            [over] = group.agree([time.perf_counter() - start_s > budget_s])
            if over and number >= _FEWEST_SHAPES and _can_be_fitted(profile.rows):
                logger.info("profiled %d of %d shapes within %.0f s", number, len(microbatches), budget_s)
                break
            found = _profile_one(layers, bench, members, group)
            if kept is not None and group.is_first:
                kept.append(number, *found)
        profile.rows += found[0]
        profile.limits += found[1]
    return profile


def _can_be_fitted(rows: Sequence[ProfileRow]) -> bool:
    """Whether every layer kind was timed at two sizes; rare media may take some microbatches to occur."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        size = row.encoder_inputs if row.kind in ENCODER_KINDS else row.llm_tokens
        sizes.setdefault(row.kind, set()).add(size)
    return all(len(found) > 1 for found in sizes.values())


def one_of_each_kind(
    plans: Sequence[LayerPlan], device: torch.device, dtype: torch.dtype
) -> list[BuiltLayer]:
    """The first layer of every kind, built."""
    first: dict[str, LayerPlan] = {}
    for plan in plans:
        first.setdefault(plan.kind, plan)
    return [(plan, plan.build().to(device=device, dtype=dtype)) for plan in first.values()]


def _num_parameters(layer: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _profile_one(
    layers: Sequence[BuiltLayer], bench: Bench, members: Sequence[int], group: Group
) -> tuple[list[ProfileRow], list[ProfileLimit]]:
    sizes, hidden, vector, labels = bench.inputs(members)
    columns = {name: int(column[0]) for name, column in vars(sizes).items()}
    prepared: list[tuple[BuiltLayer, torch.Tensor, int]] = []
    limits: list[ProfileLimit] = []
    for built in layers:
        try:
            kept_bytes = bench.timer.activation_bytes(built, hidden, vector, labels)
            # The first round pays for allocation and kernel selection: it is not recorded.
            output = bench.timer.run([built], hidden, vector, labels, Timings())
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            limits.append(ProfileLimit(kind=built[0].kind, **columns))
            logger.warning("%s does not fit in memory at %s", built[0].kind, columns)
            break
        prepared.append((built, hidden, kept_bytes))
        hidden = output
    timings = _repeat(bench.timer, prepared, vector, labels, group)
    rows = []
    for ((plan, _), _, kept_bytes), timing in zip(prepared, timings, strict=True):
        if columns["encoder_inputs"] or plan.kind not in ENCODER_KINDS:
            rows.append(
                ProfileRow(
                    kind=plan.kind,
                    forward_s=statistics.median(timing.forward_s),
                    backward_s=statistics.median(timing.backward_s),
                    activation_bytes=kept_bytes,
                    **columns,
                )
            )
    return rows, limits


def _repeat(
    timer: LayerTimer,
    prepared: Sequence[tuple[BuiltLayer, torch.Tensor, int]],
    vector: torch.Tensor,
    labels: tuple[torch.Tensor, ...],
    group: Group,
) -> list[Timings]:
    timings = [Timings() for _ in prepared]
    for _ in range(_MOST_REPEATS):
        known = group.agree([median_is_known(timing.totals_s()) for timing in timings])
        waiting = [index for index, done in enumerate(known) if not done]
        if not waiting:
            break
        for index in waiting:
            built, hidden, _ = prepared[index]
            timer.run([built], hidden, vector, labels, timings[index])
    return timings


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device or the host has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "not enough memory" in str(error) or "can't allocate memory" in str(error)
