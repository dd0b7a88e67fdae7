"""Attention inside segments against a dense block mask in double precision."""

from __future__ import annotations

import types

import pytest
import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflop_ds.errors import ConfigError
from dflop_ds.models.attention import (
    SEGMENTS_NAME,
    VARLEN_NAME,
    register_attention,
    resolve_backend,
    segment_attention,
    varlen_attention,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS, DIM = 4, 6


def _module(*, causal: bool = True, groups: int = 1) -> types.SimpleNamespace:
    return types.SimpleNamespace(is_causal=causal, num_key_value_groups=groups)


def _states(num_tokens: int, *, groups: int = 1, batch: int = 1) -> list[torch.Tensor]:
    """Query, key and value with the strides that transformers hands over."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(batch, num_tokens, heads, DIM, dtype=torch.float64, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (HEADS, HEADS // groups, HEADS // groups)
    ]


def _dense(
    states: list[torch.Tensor], lengths: tuple[int, ...], *, causal: bool, groups: int = 1, scale: float
) -> torch.Tensor:
    """Softmax attention under an explicit block mask, shape (batch, tokens, heads, dim)."""
    query, key, value = states
    key = torch.stack([key[:, head // groups] for head in range(HEADS)], dim=1)
    value = torch.stack([value[:, head // groups] for head in range(HEADS)], dim=1)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = segment[:, None] == segment[None, :]
    if causal:
        allowed = allowed & torch.ones_like(allowed).tril()
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value)


def _assert_same(found: torch.Tensor, expected: torch.Tensor, states: list[torch.Tensor]) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert expected.abs().min() > 0
    direction = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    pairs = zip(
        torch.autograd.grad(found, states, direction),
        torch.autograd.grad(expected, states, direction),
        strict=True,
    )
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths", [(5, 1, 7), (1, 1, 1), (4, 4, 4), (6, 6), (9,), (1,), (2, 3, 2, 3)], ids=str
)
def test_equals_a_dense_block_causal_mask(groups: int, lengths: tuple[int, ...]) -> None:
    states = _states(sum(lengths), groups=groups)
    module = _module(groups=groups)
    found, weights = segment_attention(module, *states, None, scaling=0.3, segment_lengths=lengths)
    assert weights is None
    _assert_same(found, _dense(states, lengths, causal=True, groups=groups, scale=0.3), states)


@pytest.mark.parametrize("lengths", [(9,), None])
@pytest.mark.parametrize("groups", [1, 2])
def test_varlen_without_several_segments_needs_no_kernel(groups: int, lengths: tuple[int] | None) -> None:
    states = _states(9, groups=groups)
    found, weights = varlen_attention(
        _module(groups=groups), *states, None, scaling=0.3, segment_lengths=lengths
    )
    assert weights is None
    _assert_same(found, _dense(states, (9,), causal=True, groups=groups, scale=0.3), states)


def test_equal_and_unequal_lengths_take_the_same_values() -> None:
    """The folded path and the split path agree where both apply."""
    states = _states(8)
    folded, _ = segment_attention(_module(), *states, None, segment_lengths=(4, 4))
    halves = [
        segment_attention(_module(), *(s[:, :, part] for s in states), None, segment_lengths=(4,))[0]
        for part in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(folded, torch.cat(halves, dim=1), rtol=1e-10, atol=1e-12)


def test_no_token_sees_another_segment() -> None:
    states = _states(9)
    lengths = (4, 3, 2)
    before, _ = segment_attention(_module(), *states, None, segment_lengths=lengths)
    changed = [state.detach().clone() for state in states]
    for state in changed:
        state[:, :, 4:7] += 10.0
    after, _ = segment_attention(_module(), *changed, None, segment_lengths=lengths)
    same = (before == after).all(dim=-1).all(dim=-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 3 + [True] * 2


def test_vision_attends_each_batch_entry_as_a_whole() -> None:
    states = _states(5, batch=3)
    found, _ = segment_attention(_module(causal=False), *states, None, scaling=0.5)
    _assert_same(found, _dense(states, (5,), causal=False, scale=0.5), states)


def test_the_argument_overrides_the_module() -> None:
    states = _states(5)
    found, _ = segment_attention(
        _module(causal=True), *states, None, scaling=0.5, is_causal=False, segment_lengths=(2, 3)
    )
    _assert_same(found, _dense(states, (2, 3), causal=False, scale=0.5), states)


def test_default_scale_is_that_of_the_head_size() -> None:
    states = _states(5)
    found, _ = segment_attention(_module(), *states, None, segment_lengths=(2, 3))
    _assert_same(found, _dense(states, (2, 3), causal=True, scale=DIM**-0.5), states)


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "expected"),
    [
        ("auto", CPU, torch.float32, SEGMENTS_NAME),
        ("auto", CPU, torch.bfloat16, SEGMENTS_NAME),
        ("auto", CUDA, torch.float32, SEGMENTS_NAME),
        ("auto", CUDA, torch.bfloat16, VARLEN_NAME),
        ("segments", CPU, torch.float32, SEGMENTS_NAME),
        ("segments", CUDA, torch.bfloat16, SEGMENTS_NAME),
        ("varlen", CUDA, torch.bfloat16, VARLEN_NAME),
        ("varlen", CUDA, torch.float16, VARLEN_NAME),
    ],
)
def test_choice_of_the_backend(
    requested: str, device: torch.device, dtype: torch.dtype, expected: str
) -> None:
    assert resolve_backend(requested, device, dtype) == expected


@pytest.mark.parametrize(
    ("device", "dtype", "found"),
    [
        (CPU, torch.bfloat16, "found cpu, torch.bfloat16"),
        (CPU, torch.float32, "found cpu, torch.float32"),
        (CUDA, torch.float32, "found cuda, torch.float32"),
    ],
)
def test_varlen_is_refused_where_its_kernel_cannot_run(
    device: torch.device, dtype: torch.dtype, found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        resolve_backend("varlen", device, dtype)


def test_registering_twice_changes_nothing() -> None:
    register_attention()
    first = dict(AttentionInterface())
    register_attention()
    assert dict(AttentionInterface()) == first
    assert ALL_ATTENTION_FUNCTIONS[SEGMENTS_NAME] is segment_attention
    assert ALL_ATTENTION_FUNCTIONS[VARLEN_NAME] is varlen_attention
