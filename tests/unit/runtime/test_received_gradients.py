"""A parameter's gradient must not lie in the memory into which the next gradient is received."""

from __future__ import annotations

import types

import torch

from dflop_ds.runtime import compat


def test_a_slice_of_the_output_keeps_its_gradient() -> None:
    newline = torch.nn.Parameter(torch.zeros(3))
    output = torch.cat([torch.zeros(2, 3), newline[None]])
    engine = types.SimpleNamespace(grad_layer=[torch.full((3, 3), 2.0)])
    torch.autograd.backward([output], compat.received_gradients(engine))  # type: ignore[arg-type]
    engine.grad_layer[0].fill_(7.0)
    assert newline.grad is not None
    assert newline.grad.tolist() == [2.0, 2.0, 2.0]
