"""All layouts of a search space, as columns of numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import ConfigError
from dflop_ds.planning.layout import Degrees, Layout, SearchSpace, divisors
from dflop_ds.planning.stages import StageTable

IntArray = npt.NDArray[np.int64]

NO_ENCODER = 0


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Layouts as columns, arrays of shape (n,).

    Attributes
    ----------
    encoder, llm : ndarray of int64, shape (n, 3)
        Tensor, pipeline and data degrees; the encoder's are 0 in a uniform pipeline.
    num_microbatches, zero_stage : ndarray of int64
    checkpointing : ndarray of bool
    """

    encoder: IntArray
    llm: IntArray
    num_microbatches: IntArray
    checkpointing: npt.NDArray[np.bool_]
    zero_stage: IntArray

    def __len__(self) -> int:
        return len(self.num_microbatches)

    def layout(self, index: int) -> Layout:
        """One of them."""
        encoder = self.encoder[index].tolist()
        return Layout(
            encoder=Degrees(*encoder) if encoder[0] != NO_ENCODER else None,
            llm=Degrees(*self.llm[index].tolist()),
            num_microbatches=int(self.num_microbatches[index]),
            activation_checkpointing=bool(self.checkpointing[index]),
            zero_stage=int(self.zero_stage[index]),
        )


def enumerate_layouts(stages: StageTable, space: SearchSpace) -> Candidates:
    """Every layout that uses all GPUs and divides the batch evenly.

    Raises
    ------
    ConfigError
        If there is none, naming what does not divide.
    """
    workload = stages.workload
    degrees: list[tuple[int, ...]] = []
    if "uniform" in space.kinds:
        degrees += [(0, 0, 0, *whole) for whole in _degrees(stages, space, "all", space.num_gpus)]
    if "separate" in space.kinds:
        degrees += _separate(stages, space)
    rows = []
    for row in degrees:
        depth = row[1] + row[4]
        if depth < space.min_stages or (space.max_stages and depth > space.max_stages):
            continue
        # DeepSpeed needs train_batch_size = samples x microbatches x replicas in whole numbers.
        for count in divisors(workload.batch_size // row[5]):
            if space.num_microbatches and count not in space.num_microbatches:
                continue
            rows.append((*row, count))
    if not rows:
        largest = min(space.max_tensor, workload.hardware.gpus_per_node)
        raise ConfigError(
            f"some layout must use {space.num_gpus} GPUs and divide the batch of {workload.batch_size} "
            f"samples among its replicas, found none that is {' or '.join(space.kinds)} with "
            f"{_stage_range(space, len(workload.layers))} stages and tensor degrees up to "
            f"{largest}. Change the number of GPUs, or train_batch_size, or allow other layouts."
        )
    base = np.array(rows, dtype=np.int64)
    options = [(c, z) for c in space.checkpointing for z in space.zero_stages]
    columns = np.repeat(base, len(options), axis=0)
    chosen = np.tile(np.array(options, dtype=np.int64), (len(base), 1))
    return Candidates(
        encoder=columns[:, :3],
        llm=columns[:, 3:6],
        num_microbatches=columns[:, 6],
        checkpointing=chosen[:, 0].astype(np.bool_),
        zero_stage=chosen[:, 1],
    )


def _stage_range(space: SearchSpace, num_layers: int) -> str:
    most = min(space.max_stages or num_layers, num_layers)
    return f"{space.min_stages} to {most}"


def _tensor_degrees(stages: StageTable, space: SearchSpace, name: str) -> list[int]:
    """Tensor degrees that fit into a node and divide the heads of the part."""
    dims = stages.workload.model.memory.dims
    heads = []
    if name != "encoder":
        heads += [dims.llm.num_heads, dims.llm.num_kv_heads]
    if name != "llm":
        heads.append(dims.vision.num_heads)
    largest = min(space.max_tensor, stages.workload.hardware.gpus_per_node)
    per_node = divisors(stages.workload.hardware.gpus_per_node)
    return [t for t in per_node if t <= largest and all(number % t == 0 for number in heads)]


def _degrees(stages: StageTable, space: SearchSpace, name: str, num_gpus: int) -> list[tuple[int, int, int]]:
    """Degrees of a part that use so many GPUs, with replicas that divide the batch."""
    found = []
    for tensor in _tensor_degrees(stages, space, name):
        if num_gpus % tensor:
            continue
        for depth in divisors(num_gpus // tensor):
            data = num_gpus // tensor // depth
            if depth <= stages.num_layers(name) and stages.workload.batch_size % data == 0:
                found.append((tensor, depth, data))
    return found


def _separate(stages: StageTable, space: SearchSpace) -> list[tuple[int, ...]]:
    """Degrees of encoder and LLM that add up to all GPUs, one's replicas a multiple of the other's."""
    batch_size, num_gpus = stages.workload.batch_size, space.num_gpus
    encoders, llms = (
        np.array(
            [
                (tensor, depth)
                for tensor in _tensor_degrees(stages, space, name)
                for depth in range(1, stages.num_layers(name) + 1)
            ],
            dtype=np.int64,
        )
        for name in ("encoder", "llm")
    )
    found: set[tuple[int, ...]] = set()
    # With d replicas of the one and k * d of the other, d divides the number of GPUs.
    for data in divisors(num_gpus):
        if batch_size % data:
            continue
        for few, many, encoder_has_many in ((llms, encoders, True), (encoders, llms, False)):
            rest = (num_gpus // data - few.prod(axis=1))[:, None]
            ratio, over = np.divmod(rest, many.prod(axis=1)[None, :])
            fits = (over == 0) & (ratio >= 1)
            fits[fits] = batch_size % (data * ratio[fits]) == 0
            for first, second in np.argwhere(fits).tolist():
                one = (*few[first].tolist(), data)
                other = (*many[second].tolist(), data * int(ratio[first, second]))
                found.add((*other, *one) if encoder_has_many else (*one, *other))
    return sorted(found)
