"""Attention inside the segments of a packed microbatch.

Samples of a microbatch are concatenated into one sequence; no token may attend across samples.
A dense block mask costs the square of the whole sequence, so each segment is attended on its own
(or all of them at once, where a variable-length kernel exists). The function is registered with
``transformers.AttentionInterface`` and so serves the layers of every model family.
"""

from __future__ import annotations

import inspect
import itertools

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from dflop_ds.errors import ConfigError

SEGMENTS_NAME = "dflop_segments"
VARLEN_NAME = "dflop_varlen"

_HALF = (torch.float16, torch.bfloat16)


def register_attention() -> None:
    """Make both backends known to transformers; harmless when called again."""
    AttentionInterface.register(SEGMENTS_NAME, segment_attention)
    AttentionInterface.register(VARLEN_NAME, varlen_attention)


def resolve_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """Name under which transformers finds the wanted backend.

    Parameters
    ----------
    requested : {"auto", "segments", "varlen"}
        ``auto`` takes the variable-length kernel on CUDA in half precision, else one scaled
        dot product per segment.

    Raises
    ------
    ConfigError
        If ``varlen`` is asked for where its kernel cannot run.
    """
    can_varlen = device.type == "cuda" and dtype in _HALF and _has_varlen_kernel()
    if requested == "varlen" and not can_varlen:
        raise ConfigError(
            'dflop.model.attention "varlen" needs a CUDA device, bf16 and a PyTorch with varlen_attn, '
            f'found {device.type}, {dtype} and PyTorch {torch.__version__}; use "auto" or "segments".'
        )
    if requested == "segments" or not can_varlen:
        return SEGMENTS_NAME
    return VARLEN_NAME


def _has_varlen_kernel() -> bool:
    """Whether this PyTorch has the kernel in the form that is called here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """One scaled dot product per segment; equal lengths are attended as one batch.

    Parameters
    ----------
    query, key, value : Tensor, shape (batch, heads, tokens, head_dim)
        ``batch`` is 1 when ``segment_lengths`` is given.
    segment_lengths : tuple of int, optional
        Lengths of the packed samples; ``None`` attends each batch entry as a whole.

    Returns
    -------
    Tensor, shape (batch, tokens, heads, head_dim)
        And ``None`` for the attention weights, which are never formed.
    """
    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    key, value = _expand_groups(module, key), _expand_groups(module, value)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=causal)

    if segment_lengths is None or len(segment_lengths) == 1:
        return attend(query, key, value).transpose(1, 2), None
    if len(set(segment_lengths)) == 1:
        batch = [_fold(x, segment_lengths) for x in (query, key, value)]
        out = attend(*batch).transpose(1, 2)
        return out.reshape(1, -1, *out.shape[2:]), None
    parts = [states.split(list(segment_lengths), dim=2) for states in (query, key, value)]
    found: dict[int, torch.Tensor] = {}
    for members in _equal_lengths(segment_lengths):
        batch = [torch.cat([part[i] for i in members]) for part in parts]
        found |= zip(members, attend(*batch).split(1), strict=True)
    return torch.cat([found[i] for i in range(len(found))], dim=2).transpose(1, 2), None


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """All segments in one variable-length kernel; same contract as :func:`segment_attention`."""
    if segment_lengths is None or len(segment_lengths) == 1 or dropout > 0:
        return segment_attention(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, segment_lengths
        )
    from torch.nn.attention.varlen import varlen_attn

    causal = bool(getattr(module, "is_causal", False)) if is_causal is None else is_causal
    key, value = _expand_groups(module, key), _expand_groups(module, value)
    starts = torch.tensor([0, *itertools.accumulate(segment_lengths)], dtype=torch.int32, device=query.device)
    longest = max(segment_lengths)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window)
    return out.unsqueeze(0), None


def _expand_groups(module: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Repeat grouped key or value heads, shape (batch, heads, tokens, head_dim)."""
    groups = getattr(module, "num_key_value_groups", 1)
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def _equal_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Segments of the same length together, by their positions."""
    groups: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        groups.setdefault(length, []).append(position)
    return list(groups.values())


def _fold(states: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Turn equal segments of one sequence into a batch."""
    _, heads, _, dim = states.shape
    return states.view(heads, len(lengths), lengths[0], dim).transpose(0, 1)
