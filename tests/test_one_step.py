"""Tiny self-attention in one step gives the bits, gradients and errors of the ordinary way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead._layer import known_calls, one_step

from .tiny_layers import B, E, L, causal, input_of, kinds, made, needs_native, run, went_in_one_step


def nothing_done(*_: object) -> None:
    pass


def derivatives(module: nn.Module, x: Tensor, causal: bool = False, residual: bool = False) -> list[Tensor]:
    """Output and gradients of input and parameters, the input used once more beside the layer if asked for."""
    y = x * 1.5
    output = run(module, y, causal)
    output = (output[..., :11] + y[..., :11]).tanh() if residual else output
    return [output, *torch.autograd.grad(output.square().sum(), [x, *module.parameters()])]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative to the largest of all, since the gradient of a key's bias is nothing but rounding."""
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, exact, strict=True)]
    largest = max(other.abs().max() for _, other in pairs)
    return max(float((one - other).abs().max() / largest) for one, other in pairs)


@needs_native
@kinds
@causal
@pytest.mark.parametrize("residual", [False, True])
def test_the_bits_are_those_of_the_modules(kind: str, causal: bool, residual: bool) -> None:
    module, x = made(kind), input_of()
    assert went_in_one_step(run(module, x, causal))
    found = derivatives(module, x, causal, residual)
    with torch.no_grad():
        alone = run(module, x * 1.5, causal)
    for child in module.children():
        child.register_forward_hook(nothing_done)
    assert not went_in_one_step(run(module, x, causal))
    expected = derivatives(module, x, causal, residual)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(run(module, x * 1.5, causal), alone)


@needs_native
@kinds
@causal
def test_against_float64(kind: str, causal: bool) -> None:
    module = made(kind)
    twin = copy.deepcopy(module).double()
    found, exact = derivatives(module, input_of(), causal), derivatives(twin, input_of(torch.float64), causal)
    assert error(found[:1], exact[:1]) < 1e-5
    assert error(found[1:], exact[1:]) < 1e-5


@needs_native
@pytest.mark.parametrize("kind", ["own", "drop-in", "drop-in, length first"])
def test_second_derivatives(kind: str) -> None:
    module = made(kind)
    twin = copy.deepcopy(module).double()

    def penalty(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(run(module, x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, *module.parameters()), allow_unused=True)

    assert error(penalty(module, input_of()), penalty(twin, input_of(torch.float64))) < 1e-5


@needs_native
@pytest.mark.parametrize("kind", ["own", "drop-in"])
def test_many_gradients_at_once(kind: str) -> None:
    module, x = made(kind), input_of()
    output, gradients = run(module, x), torch.randn(4, B, L, E)
    found = torch.autograd.grad(output, x, gradients, is_grads_batched=True, retain_graph=True)[0]
    for one, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(output, x, gradient, retain_graph=True)[0])


@needs_native
@pytest.mark.parametrize("wanted", ["x", "q_proj.weight", "k_proj.bias", "out_proj.weight", "out_proj.bias"])
def test_only_the_gradients_that_are_wanted(wanted: str) -> None:
    module = made("own").requires_grad_(False)
    x = input_of(requires_grad=wanted == "x")
    leaf = x if wanted == "x" else module.get_parameter(wanted).requires_grad_()
    run(module, x).square().sum().backward()
    given = leaf.grad
    others = [x, *module.parameters()]
    assert [tensor is leaf for tensor in others] == [tensor.grad is not None for tensor in others]
    module.requires_grad_()
    leaf.grad = None
    run(module, x).square().sum().backward()
    assert given is not None
    assert leaf.grad is not None
    assert torch.equal(given, leaf.grad)


@needs_native
def test_shared_projections_add_up_their_gradients() -> None:
    module, x = made("own"), input_of()
    module.k_proj, module.v_proj = module.q_proj, module.q_proj
    found = derivatives(module, x)
    module.out_proj.register_forward_hook(nothing_done)
    assert all(torch.equal(*pair) for pair in zip(found, derivatives(module, x), strict=True))


@needs_native
@pytest.mark.parametrize("kind", ["own", "drop-in"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_checkpointing(kind: str, reentrant: bool, recorded: bool) -> None:
    """Also where a recorder saw the first pass and does not see the second."""
    module, x = made(kind), input_of()
    expected = derivatives(module, x)
    with clearhead.record(module) if recorded else nullcontext():
        output = checkpoint(lambda y: run(module, y), x * 1.5, use_reentrant=reentrant)
    output.square().sum().backward()
    found = [output, x.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@needs_native
def test_a_backward_pass_under_autocast_stays_in_float32() -> None:
    module, x = made("own"), input_of()
    expected = derivatives(module, x)
    output = run(module, x * 1.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(output.square().sum(), [x, *module.parameters()])
    assert all(torch.equal(*pair) for pair in zip(found, expected[1:], strict=True))


@needs_native
@pytest.mark.parametrize("gradient", ["expanded", "transposed", "negated"])
def test_gradients_that_are_views(gradient: str) -> None:
    module, x = made("own"), input_of()
    given = {
        "expanded": torch.ones(()).expand(B, L, E),
        "transposed": torch.randn(E, L, B).permute(2, 1, 0),
        "negated": torch._neg_view(torch.randn(B, L, E)),
    }[gradient]
    (found,) = torch.autograd.grad(run(module, x), x, given)
    (expected,) = torch.autograd.grad(run(module, x), x, given.resolve_neg().contiguous())
    torch.testing.assert_close(found, expected)


def test_the_output_may_be_changed_in_place() -> None:
    module, x = made("own"), input_of()
    output = run(module, x)
    output += x
    (found,) = torch.autograd.grad(output.sum(), x)
    (expected,) = torch.autograd.grad((run(module, x) + x).sum(), x)
    torch.testing.assert_close(found, expected)


def test_what_is_saved_may_not_be_changed_in_place() -> None:
    module, x = made("own"), input_of()
    y = x * 2
    output = run(module, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_nothing_is_kept() -> None:
    module, x = made("own"), input_of()
    output = run(module, x)
    seen = [weakref.ref(x), weakref.ref(output), weakref.ref(module.q_proj.weight)]
    del module, x, output
    gc.collect()
    assert [each() for each in seen] == [None] * 3


def test_growing_inputs_do_not_fill_the_memory() -> None:
    module = clearhead.MultiHeadAttention(2, 1).eval()
    with torch.no_grad():
        for length in range(1, 400):
            module(torch.zeros(1, length, 2))
    assert 0 < len(known_calls._plans) <= known_calls._MOST


@needs_native
def test_large_products_are_left_to_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = made("own"), input_of()
    monkeypatch.setattr(one_step, "is_pytorchs_product", lambda rows, numbers: rows * numbers < B * L * E * E)
    assert not went_in_one_step(run(module, x))
