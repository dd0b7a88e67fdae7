"""What else a user wants to know of a plan: samples that do not fit, the loader, and what is missing."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.errors import ConfigError
from dflop_ds.planning.evaluation import Evaluation
from dflop_ds.planning.layout import SearchSpace
from dflop_ds.planning.search import Search, search
from dflop_ds.planning.workload import Workload

MIN_GAIN = 0.02
"""Below it balancing is not worth a word."""

_MOST_DOUBLINGS = 6
_CAP_QUANTILES = (0.99, 0.95, 0.9, 0.75, 0.5)


def oversized_rows(workload: Workload, plan: Evaluation, limit_bytes: float) -> npt.NDArray[np.int64]:
    """Rows of the table whose sample does not fit even into a microbatch of its own, largest first.

    Beside it mean microbatches are in flight.
    """
    need = np.zeros(len(workload.table))
    every = MicrobatchFeatures.from_shapes(workload.table)
    edges = [0, *itertools.accumulate(plan.sizes)]
    layout = plan.layout
    for stage, (first, last) in enumerate(itertools.pairwise(edges)):
        degrees = layout.stage_degrees[stage]
        own = _kept_bytes(workload, workload.layers[first:last], every, layout.activation_checkpointing)
        in_flight = min(len(plan.sizes) - stage, layout.num_microbatches)
        mean = float(own.sum()) / len(own) * workload.batch_size / (degrees.data * layout.num_microbatches)
        state = plan.memory[stage].state_bytes
        need = np.maximum(need, state + (own + (in_flight - 1) * mean) / degrees.tensor)
    rows = np.flatnonzero(need > limit_bytes)
    return rows[np.argsort(-need[rows], kind="stable")]


def _kept_bytes(
    workload: Workload, layers: tuple[str, ...], features: MicrobatchFeatures, checkpointing: bool
) -> FloatArray:
    model, total = workload.model.memory, np.zeros(len(features))
    scale = workload.model.value_bytes / model.value_bytes
    for kind in dict.fromkeys(layers):
        if not workload.training[kind].has_backward:
            continue
        full = model.activation_bytes(kind, features) * scale
        if checkpointing:
            total = np.maximum(total, full)
            total = total + layers.count(kind) * model.input_bytes(kind, features, workload.model.value_bytes)
        else:
            total = total + layers.count(kind) * full
    return total


@dataclasses.dataclass(frozen=True)
class Payoff:
    """Whether balancing pays.

    Attributes
    ----------
    gain : float
        Share of the step that data-aware bins save.
    loader_s : float or None
        Seconds that the loader processes of a replica need for a step; None if it was not measured.
    step_s : float
    """

    gain: float
    loader_s: float | None
    step_s: float

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.loader_s is not None and self.loader_s > self.step_s:
            return (
                f"loader-bound: loading takes {self.loader_s:.3g} s a step, computing {self.step_s:.3g} s. "
                f"Balancing pays only with {self.loader_s / self.step_s:.1f} times the loader processes."
            )
        if self.gain < MIN_GAIN:
            return f"balancing will not pay: it saves {self.gain:.1%} of a step on this data."
        return f"balance-bound: balancing saves {self.gain:.1%} of a step with this layout."


def what_is_missing(workload: Workload, space: SearchSpace, found: Search, limit_bytes: float) -> list[str]:
    """What would make a plan possible, one line each: memory, GPUs, a smaller cap of tokens."""
    lines = []
    needed = found.too_large.peak_bytes if found.too_large else found.least_bytes
    at_least = "" if found.too_large else "at least "
    smallest = f" ({found.too_large.layout})" if found.too_large else ""
    lines.append(
        f"memory: {at_least}{needed / 1e9:.3g} GB per GPU are needed by the smallest layout{smallest}, "
        f"{limit_bytes / 1e9:.3g} GB may be used."
    )
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        num_gpus = space.num_gpus * 2**doubling
        if _fits(workload, dataclasses.replace(space, num_gpus=num_gpus), limit_bytes):
            lines.append(f"GPUs: {num_gpus} would do.")
            break
    else:
        lines.append(f"GPUs: not even {space.num_gpus * 2**_MOST_DOUBLINGS} would do.")
    tokens = workload.table.llm_tokens
    for quantile in _CAP_QUANTILES:
        cap = int(np.quantile(tokens, quantile))
        rows = np.flatnonzero(tokens <= cap)
        if len(rows) and _fits(workload.with_rows(rows), space, limit_bytes):
            lines.append(
                f"a smaller cap: max_tokens {cap} would do, which {np.count_nonzero(tokens > cap)} of "
                f"{len(tokens)} samples exceed."
            )
            break
    else:
        lines.append("a smaller cap: not even dropping the longer half of the samples would do.")
    return lines


def _fits(workload: Workload, space: SearchSpace, limit_bytes: float) -> bool:
    try:
        return search(workload, space, limit_bytes=limit_bytes, max_simulations=1).best is not None
    except ConfigError:
        return False
