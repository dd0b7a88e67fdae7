"""The rules that all FLOP and byte counts follow, with their sources."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dflop_ds.errors import CostModelError

Count = TypeVar("Count", float, npt.NDArray[np.float64])
"""A plain number, or an array of float64 with one entry per microbatch."""

BACKWARD_RATIO = 2.0
"""Backward over forward: one product for the input gradient and one for the weight gradient."""

_BYTES_PER_VALUE = 2.0
"""Bytes of a bfloat16 or float16 value."""


def check_positive(owner: object, without: str = "") -> None:
    """Raise :class:`CostModelError` unless every field but one is a whole number of at least 1."""
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        if field.name == without:
            continue
        value = getattr(owner, field.name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CostModelError(
                f"{type(owner).__name__}.{field.name} must be a whole number of at least 1, found {value!r}. "
                "Check the model's config.json."
            )


def matmul_flops(m: Count, n: Count, k: Count) -> Count:
    """FLOPs of an ``[m, k] @ [k, n]`` product: ``2 * m * n * k``."""
    return 2.0 * m * n * k


def attention_flops(sum_squared_tokens: Count, width: int, *, causal: bool) -> Count:
    """FLOPs of attention inside segments: ``4 * width * sum(L^2)``, half of it when causal.

    Parameters
    ----------
    sum_squared_tokens : float or ndarray
        Sum over the segments of length squared, in tokens^2.
    width : int
        Heads times head width.
    causal : bool
        Whether a token sees only itself and earlier tokens.
    """
    return (2.0 if causal else 4.0) * width * sum_squared_tokens


def copy_bytes(num_tokens: Count, hidden: int) -> Count:
    """Bytes moved by a layer that reads and writes each hidden state once, in 16 bits.

    This is the traffic of an embedding look-up, of a norm, of writing media features into the
    sequence and of selecting the supervised positions.
    """
    return 2.0 * hidden * _BYTES_PER_VALUE * num_tokens
