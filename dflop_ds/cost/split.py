"""Contiguous splits of layers into pipeline stages, balanced by predicted time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflop_ds.config import DflopConfig
from dflop_ds.cost.features import FloatArray, MicrobatchFeatures
from dflop_ds.cost.gradients import LayerTraining, backward_factor
from dflop_ds.cost.model import LayerCostModel
from dflop_ds.errors import ConfigError, CostModelError
from dflop_ds.shapes import ShapeTable

_RESOLUTION = 1 << 40
"""Times are compared as whole parts of their sum: equal layers then give exactly equal stages."""

_DRAWN_BINS = 256


def configured_boundaries(
    config: DflopConfig,
    layer_kinds: Sequence[str],
    num_stages: int,
    model: LayerCostModel | None,
    table: ShapeTable,
    samples_per_bin: int,
    training: Sequence[LayerTraining] | None = None,
) -> list[int] | None:
    """Layer indices at which the stages begin, by ``dflop.parallel.split``.

    Parameters
    ----------
    config : DflopConfig
    layer_kinds : sequence of str
        Kind of every layer, in pipeline order.
    num_stages : int
    model : LayerCostModel or None
        Needed by the split "auto", which balances the mean over microbatches drawn from `table`.
    table : ShapeTable
        The training data.
    samples_per_bin : int
        Samples of a mean microbatch.
    training : sequence of LayerTraining, optional
        What is trained of each layer; by default everything.

    Returns
    -------
    list of int, length num_stages + 1, or None
        ``None`` leaves the split to DeepSpeed (``parameters`` or ``uniform``).

    Raises
    ------
    ConfigError
        If a given split does not place all layers, or "auto" has no cost model.
    """
    split = config.parallel.split
    if isinstance(split, list):
        if sum(split) != len(layer_kinds):
            raise ConfigError(
                f"dflop.parallel.split must place all {len(layer_kinds)} layers, found {split} "
                f'(sum {sum(split)}); correct it or use "auto".'
            )
        return [0, *itertools.accumulate(split)]
    if split != "auto":
        return None
    if model is None:
        raise ConfigError('dflop.parallel.split "auto" needs a cost model; profile the model first.')
    rng = np.random.default_rng(config.seed)
    size = min(samples_per_bin, len(table))
    bins = [rng.choice(len(table), size=size, replace=False).tolist() for _ in range(_DRAWN_BINS)]
    features = MicrobatchFeatures.from_bins(table, bins)
    checkpointed = config.parallel.activation_checkpointing
    times_s = expected_layer_times(model, layer_kinds, features, training, checkpointed)
    return balanced_split(layer_kinds, times_s, num_stages)


def expected_layer_times(
    model: LayerCostModel,
    layer_kinds: Sequence[str],
    features: MicrobatchFeatures,
    training: Sequence[LayerTraining] | None = None,
    activation_checkpointing: bool = False,
) -> FloatArray:
    """Mean over microbatches of the forward plus backward seconds of each layer.

    Parameters
    ----------
    model : LayerCostModel
        Fitted for every kind in `layer_kinds`.
    layer_kinds : sequence of str, length num_layers
    features : MicrobatchFeatures, at least one microbatch
    training : sequence of LayerTraining, length num_layers, optional
        What is trained of each layer; by default everything.
    activation_checkpointing : bool
        Whether the profiled backward passes contain a second forward pass.

    Returns
    -------
    ndarray, shape (num_layers,)

    Raises
    ------
    CostModelError
        If there is no microbatch or the model does not know a kind.
    """
    if not len(features):
        raise CostModelError(
            "layer times must be averaged over at least one microbatch, found none. Pass some."
        )
    states = training or [LayerTraining()] * len(layer_kinds)
    times_s = {kind: model.predict(kind, features) for kind in dict.fromkeys(layer_kinds)}
    mean_s = {}
    for kind, state in dict.fromkeys(zip(layer_kinds, states, strict=True)):
        forward_s, backward_s = times_s[kind]
        if training is not None:
            factor = backward_factor(kind, features, model.dims_, state, activation_checkpointing)
            backward_s = backward_s * factor
        mean_s[kind, state] = float(np.mean(forward_s + backward_s))
    return np.array([mean_s[layer] for layer in zip(layer_kinds, states, strict=True)], dtype=np.float64)


def balanced_split(layer_kinds: Sequence[str], layer_times_s: npt.ArrayLike, num_stages: int) -> list[int]:
    """Contiguous split of the layers that minimises the time of the slowest stage.

    The split is exact, by dynamic programming over prefixes. Among splits with equal slowest stages the
    one with the smaller second slowest stage wins, and so on down; then the earliest boundaries.

    Parameters
    ----------
    layer_kinds : sequence of str, length num_layers
        In pipeline order; named in errors.
    layer_times_s : array_like, shape (num_layers,)
        Forward plus backward seconds of each layer, see :func:`expected_layer_times`.
    num_stages : int
        Every stage gets at least one layer.

    Returns
    -------
    list of int, length num_stages + 1
        Stage s holds the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.

    Raises
    ------
    CostModelError
        If there are fewer layers than stages, or a time is negative, NaN or infinite.
    """
    times_s = np.asarray(layer_times_s, dtype=np.float64)
    _check(layer_kinds, times_s, num_stages)
    num_layers = len(times_s)
    total_s = float(times_s.sum())
    parts = [round(time / total_s * _RESOLUTION) if total_s > 0 else 0 for time in times_s.tolist()]
    prefix = [0, *itertools.accumulate(parts)]
    limit = _smallest_maximum(prefix, num_stages)
    still_needed = _fewest_stages(prefix, limit)
    # best[end]: the split of the first `end` layers into `stage` stages, as (stage times from slowest to
    # fastest, boundaries). Adding the same stage to two such vectors keeps their order, so prefixes of
    # the best split are best themselves.
    best: dict[int, tuple[list[int], list[int]]] = {0: ([], [0])}
    for stage in range(1, num_stages + 1):
        extended: dict[int, tuple[list[int], list[int]]] = {}
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            if still_needed[end] > num_stages - stage:
                continue  # what follows does not fit into the stages that are left
            candidates = []
            for start in range(end - 1, stage - 2, -1):
                time = prefix[end] - prefix[start]
                if time > limit:
                    break
                if start in best:
                    times, boundaries = best[start]
                    candidates.append((sorted([*times, time], reverse=True), [*boundaries, end]))
            if candidates:
                extended[end] = min(candidates)
        best = extended
    return best[num_layers][1]


def _smallest_maximum(prefix: Sequence[int], num_stages: int) -> int:
    """Smallest possible time of the slowest stage, by bisection over whole numbers.

    Using fewer stages than allowed is no worse, since a stage of several layers can be cut further without
    growing.
    """
    largest = max(after - before for before, after in itertools.pairwise(prefix))
    even = -(-prefix[-1] // num_stages)
    # Stages that are closed only when the next layer does not fit into `even + largest` hold `even` or more.
    low, high = max(largest, even), even + largest
    while low < high:
        limit = (low + high) // 2
        if _fewest_stages(prefix, limit)[0] <= num_stages:
            high = limit
        else:
            low = limit + 1
    return low


def _fewest_stages(prefix: Sequence[int], limit: int) -> list[int]:
    """Stages of at most `limit` that the layers from each one on need, shape (num_layers + 1,)."""
    num_layers = len(prefix) - 1
    needed, reach = [0] * (num_layers + 1), num_layers
    for start in range(num_layers - 1, -1, -1):
        while prefix[reach] - prefix[start] > limit:
            reach -= 1
        needed[start] = needed[reach] + 1
    return needed


def _check(layer_kinds: Sequence[str], times_s: FloatArray, num_stages: int) -> None:
    if times_s.shape != (len(layer_kinds),):
        raise CostModelError(
            f"every layer must have one time, found {len(layer_kinds)} layers and shape {times_s.shape}. "
            "Use expected_layer_times with the same layers."
        )
    if not 1 <= num_stages <= len(layer_kinds):
        raise CostModelError(
            f"num_stages must be between 1 and the number of layers, found num_stages={num_stages} for "
            f"{len(layer_kinds)} layers. Use fewer pipeline stages."
        )
    bad = ~(np.isfinite(times_s) & (times_s >= 0))
    if bad.any():
        layer = int(bad.argmax())
        raise CostModelError(
            f"layer times must be finite and not negative, found {times_s[layer]} for layer {layer} "
            f"({layer_kinds[layer]}). Profile the layer again."
        )
