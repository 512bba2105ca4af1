"""Second derivatives: those of one process where heads are split, and an error wherever parts are exchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import masks
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.errors import KernelError

from .building import HEADS, attention, gradients, layouts, methods, require_close, sequences
from .processes import in_processes, line

MATCH = "second derivatives do not follow exchanges"


def _penalty(module: Any, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """The first derivative of the input, and the gradients of its squares."""
    own = x.clone().requires_grad_()
    output = module(own, **options)
    torch.manual_seed(4)
    (first,) = torch.autograd.grad((output * torch.randn_like(output)).sum(), own, create_graph=True)
    first.square().sum().backward()
    assert own.grad is not None
    module.out_proj.bias.grad = torch.zeros_like(module.out_proj.bias)  # nothing depends on it
    return {"first": first.detach(), "input": own.grad} | gradients(module)


@in_processes(2)
def test_where_heads_are_split_they_are_those_of_one_process() -> None:
    (x,) = sequences(9)
    for kv_heads in (2, 1):
        whole = attention(kv_heads, sinks=True)
        expected = _penalty(copy.deepcopy(whole), x, mask=masks.causal())
        found = _penalty(tensor_parallel(whole, line()), x, mask=masks.causal())
        for name, number in expected.items():
            require_close(found[name], number, 1e-12, name)


def _first_then_second(output: Tensor, x: Tensor) -> None:
    """The first derivative may be part of a graph; each way to ask for the second raises."""
    (expected,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    require_close(first.detach(), expected, 1e-15)
    with pytest.raises(KernelError, match=MATCH):
        torch.autograd.grad(first.sum(), x, allow_unused=True, retain_graph=True)
    with pytest.raises(KernelError, match=MATCH):
        first.square().sum().backward(retain_graph=True)


@in_processes(2)
@layouts
@methods
def test_where_sequences_are_split_they_are_refused(method: Any, layout: Any) -> None:
    split = context_parallel(attention(2), line(), method=method, layout=layout)
    x = shard_sequence(*sequences(9), line(), layout=layout).clone().requires_grad_()
    output = split(x, mask=masks.causal())
    _first_then_second(output, x)
    # The gradient that comes in is constant, and that of the scores depends on the input all the same.
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=MATCH):
        first.sum().backward()


@in_processes(2)
def test_through_a_gathered_sequence_they_are_refused() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    _first_then_second(gather_sequence(x, line()), x)
    (first,) = torch.autograd.grad(gather_sequence(x, line()).sum(), x, create_graph=True)
    assert not first.requires_grad  # of a linear function it is zero


@in_processes(2)
def test_of_a_bias_whose_heads_are_split_they_are_refused() -> None:
    learnt = torch.randn(1, HEADS, 9, 9, dtype=torch.float64, requires_grad=True)
    split = tensor_parallel(attention(2), line())
    _first_then_second(split(*sequences(9), mask=masks.bias(learnt)), learnt)
