"""The packed loss by hand, and its invariance to the partition of a batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflop_ds.runtime.loss import packed_loss

VOCAB = 7


def _labels(targets: list[int], weights: list[float]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(targets, dtype=torch.int64), torch.tensor(weights), torch.tensor([0])


def test_weighted_sum_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    # Probabilities of the targets: 3/4 and 1/5.
    expected = -(2.0 * math.log(0.75) + 0.5 * math.log(0.2))
    assert packed_loss(logits, _labels([1, 1], [2.0, 0.5])).item() == pytest.approx(expected, rel=1e-6)


def test_value_and_gradient_equal_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, VOCAB, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB, (11,), generator=generator)
    weights = torch.rand(11, generator=generator)
    found = packed_loss(logits, (targets, weights, torch.tensor([3])))
    probabilities = torch.softmax(logits.detach().double(), dim=1)
    expected = -(weights.double() * probabilities[torch.arange(11), targets].log()).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    found.backward()
    one_hot = torch.nn.functional.one_hot(targets, VOCAB)
    gradient = (probabilities - one_hot) * weights.double()[:, None]
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-7)


def test_nothing_supervised_is_zero_with_zero_gradient() -> None:
    hidden = torch.randn(0, 4)
    weight = torch.randn(VOCAB, 4, requires_grad=True)
    loss = packed_loss(hidden @ weight.T, _labels([], []))
    assert loss.shape == ()
    assert loss.item() == 0.0
    loss.backward()
    assert torch.equal(weight.grad, torch.zeros(VOCAB, 4))


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    logits = torch.randn(500, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.zeros(500, dtype=torch.int64)
    found = packed_loss(logits, (targets, torch.ones(500), torch.tensor([0])))
    expected = -torch.log_softmax(logits.double(), dim=1)[:, 0].sum()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("num_bins", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_mean_over_bins_is_the_mean_over_the_global_batch(num_bins: int, reduction: str) -> None:
    """Whatever bins the samples go to, some of them empty."""
    rng = np.random.default_rng(num_bins)
    lengths = rng.integers(0, 9, 17)
    bin_of = rng.integers(0, num_bins, 17)
    generator = torch.Generator().manual_seed(2)
    logits = [torch.randn(int(n), VOCAB, generator=generator) for n in lengths]
    targets = [torch.randint(0, VOCAB, (int(n),), generator=generator) for n in lengths]
    sums = [
        -torch.log_softmax(one.double(), dim=1).gather(1, target[:, None]).sum().item()
        for one, target in zip(logits, targets, strict=True)
    ]
    supervised = [(total, int(n)) for total, n in zip(sums, lengths, strict=True) if n]
    if reduction == "token":
        num_terms, expected = int(lengths.sum()), sum(sums) / int(lengths.sum())
        shares = [1.0] * 17
    else:
        num_terms, expected = len(supervised), sum(s / n for s, n in supervised) / len(supervised)
        shares = [1.0 / max(int(n), 1) for n in lengths]
    scale = num_bins / num_terms
    losses = []
    for index in range(num_bins):
        members = np.flatnonzero(bin_of == index).tolist()
        weights = [torch.full((int(lengths[i]),), shares[i]) for i in members]
        labels = (
            torch.cat([torch.empty(0, dtype=torch.int64), *(targets[i] for i in members)]),
            torch.cat([torch.empty(0), *weights]) * scale,
            torch.tensor([0]),
        )
        losses.append(packed_loss(torch.cat([torch.empty(0, VOCAB), *(logits[i] for i in members)]), labels))
    assert np.mean([loss.item() for loss in losses]) == pytest.approx(expected, rel=1e-5)
