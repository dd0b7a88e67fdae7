"""Two other searches for comparison: everything simulated, and the rule of DFLOP's reference release.

Both are written without the planner's search: plain loops over all numbers, and splits by trying all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dflop_ds.cost.features import MicrobatchFeatures
from dflop_ds.planning.evaluation import Evaluation, Evaluator
from dflop_ds.planning.layout import Degrees, Layout
from dflop_ds.planning.memory import ModuleBins, stage_memories
from dflop_ds.planning.stages import StageTable
from dflop_ds.planning.workload import Workload

ACCEPTED_RATIO = 1.1


def all_degrees(num_gpus: int, max_tensor: int) -> Iterator[Degrees]:
    """Every way to use exactly so many GPUs, pipeline depth and replicas by trying every number."""
    for tensor in range(1, max_tensor + 1):
        for depth in range(1, num_gpus + 1):
            for data in range(1, num_gpus + 1):
                if tensor * depth * data == num_gpus:
                    yield Degrees(tensor, depth, data)


def pairs_of_degrees(workload: Workload, num_gpus: int, max_tensor: int) -> Iterator[tuple[Degrees, Degrees]]:
    """Encoder and LLM on GPUs of their own, all GPUs used, in ascending order of every degree."""
    dims = workload.model.memory.dims
    encoder_layers = workload.layers.index("token_embed")
    llm_layers = len(workload.layers) - encoder_layers
    for encoder_gpus in range(1, num_gpus):
        for encoder in all_degrees(encoder_gpus, max_tensor):
            divides = _tensor_fits(workload, encoder, [dims.vision.num_heads])
            if encoder.pipeline > encoder_layers or not divides:
                continue
            for llm in all_degrees(num_gpus - encoder_gpus, max_tensor):
                heads = [dims.llm.num_heads, dims.llm.num_kv_heads]
                multiple = encoder.data % llm.data == 0 or llm.data % encoder.data == 0
                whole = workload.batch_size % llm.data == 0 and workload.batch_size % encoder.data == 0
                if llm.pipeline <= llm_layers and multiple and whole and _tensor_fits(workload, llm, heads):
                    yield encoder, llm


def _tensor_fits(workload: Workload, degrees: Degrees, heads: Sequence[int]) -> bool:
    per_node = workload.hardware.gpus_per_node
    return per_node % degrees.tensor == 0 and all(number % degrees.tensor == 0 for number in heads)


def exhaustive_best(
    workload: Workload, num_gpus: int, max_tensor: int, limit_bytes: float
) -> tuple[Evaluation, int]:
    """Simulate every layout with every option; the fastest that fits, and how many were simulated."""
    dims = workload.model.memory.dims
    layouts: list[tuple[Degrees | None, Degrees]] = list(pairs_of_degrees(workload, num_gpus, max_tensor))
    heads = [dims.llm.num_heads, dims.llm.num_kv_heads, dims.vision.num_heads]
    for whole in all_degrees(num_gpus, max_tensor):
        even = workload.batch_size % whole.data == 0
        if whole.pipeline <= len(workload.layers) and even and _tensor_fits(workload, whole, heads):
            layouts.append((None, whole))
    evaluator = Evaluator(StageTable(workload))
    splits = Splits(workload)
    best: Evaluation | None = None
    num_simulated = 0
    for encoder, llm in layouts:
        for count in range(1, workload.batch_size // llm.data + 1):
            if workload.batch_size // llm.data % count:
                continue
            for checkpointing, zero_stage in itertools.product((False, True), (0, 1)):
                layout = Layout(encoder, llm, count, checkpointing, zero_stage)
                found = evaluator.evaluate(layout, splits.of(layout))
                num_simulated += 1
                key = (found.step_s, found.peak_bytes)
                if found.peak_bytes <= limit_bytes and (best is None or key < (best.step_s, best.peak_bytes)):
                    best = found
    if best is None:
        raise SystemExit(f"a case of the benchmark must have a layout that fits {limit_bytes / 1e9:.1f} GB")
    return best, num_simulated


class Splits:
    """Stages with the least slowest stage, then the least second slowest and so on, by trying all splits."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._found: dict[tuple[str, int, bool], tuple[int, ...]] = {}

    def of(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each stage."""
        checkpointing = layout.activation_checkpointing
        if layout.encoder is None:
            return self._part("all", layout.llm.pipeline, checkpointing)
        encoder = self._part("encoder", layout.encoder.pipeline, checkpointing)
        return encoder + self._part("llm", layout.llm.pipeline, checkpointing)

    def _part(self, name: str, num_stages: int, checkpointing: bool) -> tuple[int, ...]:
        key = (name, num_stages, checkpointing)
        if key not in self._found:
            cut = self.workload.layers.index("token_embed")
            part = {"all": slice(None), "encoder": slice(cut), "llm": slice(cut, None)}[name]
            times_s = self._layer_times_s(checkpointing)[part]
            # Whole parts of the sum, so that equal layers give equal stages whatever the rounding.
            parts = np.rint(times_s / times_s.sum() * 2**40).astype(np.int64).tolist()
            every = _all_splits(len(parts), num_stages)
            self._found[key] = min(every, key=lambda sizes: _order(parts, sizes))
        return self._found[key]

    def _layer_times_s(self, checkpointing: bool) -> np.ndarray:
        num_bins = max(1, round(self.workload.batch_size**0.5))
        costs = self.workload.layer_costs(1, checkpointing, num_bins)
        totals_s = (costs.forward_s + costs.backward_s).sum(axis=2).mean(axis=1)
        by_kind = dict(zip(costs.kinds, totals_s.tolist(), strict=True))
        return np.array([by_kind[kind] for kind in self.workload.layers])


def _all_splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(after - before for before, after in itertools.pairwise(edges))


def _order(parts: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    edges = [0, *itertools.accumulate(sizes)]
    return sorted((sum(parts[a:b]) for a, b in itertools.pairwise(edges)), reverse=True), edges


def reference_rule(
    workload: Workload, num_gpus: int, max_tensor: int, limit_bytes: float, *, generous: bool
) -> Layout | None:
    """The layout that the acceptance rule of the reference release ends with.

    Layouts are visited in the order of their degrees. Each gets the first number of microbatches, from 1
    upwards, that fits, judged by mean microbatches (the release: by one sample). Its expected time is
    ``(microbatches + stages - 1)`` times the mean time of a mean microbatch in a stage of the slower module.
    It replaces the layout at hand if that is less than 1.1 times as long *and* it has fewer microbatches.

    Parameters
    ----------
    generous : bool
        Also accept every layout whose expected time is shorter, which the rule does not.
    """
    stages = StageTable(workload)
    chosen: Layout | None = None
    chosen_s = math.inf
    for encoder, llm in pairs_of_degrees(workload, num_gpus, max_tensor):
        for count in range(1, workload.batch_size // llm.data + 1):
            if workload.batch_size // llm.data % count:
                continue
            layout = Layout(encoder, llm, count, activation_checkpointing=True, zero_stage=0)
            if _mean_bytes(stages, layout) > limit_bytes:
                continue
            expected_s = _formula_s(workload, layout)
            fewer = chosen is not None and count < chosen.num_microbatches
            accepted = fewer and expected_s < ACCEPTED_RATIO * chosen_s
            if chosen is None or accepted or (generous and expected_s < chosen_s):
                chosen, chosen_s = layout, expected_s
            break
    return chosen


def _mean_bytes(stages: StageTable, layout: Layout) -> float:
    """Bytes of the fullest stage with mean microbatches in flight."""
    workload = stages.workload
    bins = {}
    for name, data in (("encoder", layout.encoder.data if layout.encoder else 1), ("llm", layout.llm.data)):
        share = 1.0 / (workload.num_batches * data * layout.num_microbatches)
        fields = dataclasses.fields(MicrobatchFeatures)
        sums = [getattr(workload.features, field.name).sum() for field in fields]
        bins[name] = MicrobatchFeatures(*(np.full(layout.num_microbatches, total * share) for total in sums))
    memories = stage_memories(workload, layout, stages.layout_sizes(layout), ModuleBins(**bins))
    return max(memory.total_bytes for memory in memories)


def _formula_s(workload: Workload, layout: Layout) -> float:
    """``(N + E_pp + L_pp - 1) * max(E_dur, L_dur)`` with means over all samples."""
    cut = workload.layers.index("token_embed")
    slowest_s = 0.0
    for degrees, layers in ((layout.encoder, workload.layers[:cut]), (layout.llm, workload.layers[cut:])):
        if degrees is None:
            continue
        num_bins = layout.llm.data * layout.num_microbatches
        costs = workload.layer_costs(degrees.tensor, True, num_bins)
        totals_s = (costs.forward_s + costs.backward_s).sum(axis=2).mean(axis=1)
        whole_s = sum(totals_s[costs.kinds.index(kind)] for kind in layers)
        slowest_s = max(slowest_s, whole_s / (degrees.data * layout.num_microbatches * degrees.pipeline))
    return (layout.num_microbatches + layout.num_stages - 1) * slowest_s
