"""Transforms of `torch.func` and forward-mode derivatives inside `torch.compile` give the numbers of eager ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

import clearhead
from clearhead import masks

Function = Callable[[Tensor], Tensor]
HEADS, HEAD_DIM, LENGTH = 2, 7, 5


def _dual(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


TRANSFORMS: dict[str, Callable[[Function, Tensor, Tensor], Tensor]] = {
    "jvp": lambda f, x, t: jvp(f, (x,), (t,))[1],
    "dual_level": _dual,
    "jacfwd": lambda f, x, t: jacfwd(lambda y: f(y).sum((0, 1)))(x),
    "grad": lambda f, x, t: grad(lambda y: f(y).sin().sum())(x),
    "vjp": lambda f, x, t: vjp(f, x)[1](t)[0],
    "vmap of grad": lambda f, x, t: vmap(grad(lambda y: f(y).sin().sum()))(torch.stack([x, t])),
    "hessian": lambda f, x, t: hessian(lambda factor: f(factor * x).sin().sum())(t.mean()),
}
MODULE = clearhead.MultiHeadAttention(HEADS * HEAD_DIM, HEADS)
DROP_IN = clearhead.nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True)
ENDS = torch.tensor([0, 3, LENGTH])


def _packed(x: Tensor) -> Tensor:
    return clearhead.attention_varlen(x, x, x, ENDS, ENDS)


FUNCTIONS: dict[str, Function] = {
    "attention": lambda x: clearhead.attention(x, x, x, masks.causal()),
    "lengths": lambda x: clearhead.attention(x, x, x, masks.lengths(torch.tensor([LENGTH, 2, 0]))),
    "module": lambda x: MODULE(x.transpose(1, 2).flatten(2)),
    "drop-in": lambda x: DROP_IN(*[x.transpose(1, 2).flatten(2)] * 3)[0],
    "packed": lambda x: _packed(x[0].transpose(0, 1)),
    "weights": lambda x: clearhead.attention_weights(x, x),
}
SLOW = [
    *((transform, "attention") for transform in ("jacfwd", "grad", "vjp", "hessian")),
    *(("jvp", function) for function in ("lengths", "module", "drop-in", "weights")),
    ("vmap of grad", "module"),
]
CASES = [
    *(("jvp", "attention"), ("dual_level", "attention"), ("vmap of grad", "attention"), ("jvp", "packed")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("transform", "function"), CASES)
def test_a_compiled_transform_gives_the_numbers_of_an_eager_one(transform: str, function: str) -> None:
    # Two tensors of their own: PyTorch's compiled forward derivatives fail for views of one.
    x, tangent = torch.randn(3, HEADS, LENGTH, HEAD_DIM), torch.randn(3, HEADS, LENGTH, HEAD_DIM)

    def transformed(x: Tensor, tangent: Tensor) -> Tensor:
        return TRANSFORMS[transform](FUNCTIONS[function], x, tangent)

    expected = transformed(x, tangent)
    assert expected.any()
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, tangent), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_transform_around_a_compiled_function() -> None:
    x, tangent = torch.randn(3, HEADS, LENGTH, HEAD_DIM), torch.randn(3, HEADS, LENGTH, HEAD_DIM)
    compiled = torch.compile(FUNCTIONS["attention"], backend="aot_eager")
    found, expected = (TRANSFORMS["jvp"](function, x, tangent) for function in (compiled, FUNCTIONS["attention"]))
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kernel", ["native", "sdpa"])
def test_a_forced_kernel_refuses_a_compiled_transform(kernel: str) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def tangent(x: Tensor) -> Tensor:
        return jvp(FUNCTIONS["attention"], (x,), (x,))[1]

    with clearhead.use_kernel(kernel), pytest.raises(Exception, match=r"torch\.func"):
        tangent(torch.randn(3, HEADS, LENGTH, HEAD_DIM))


@pytest.mark.usefixtures("fresh_compiler")
def test_calls_outside_transforms_keep_their_graph() -> None:
    counter, x = CompileCounter(), torch.randn(3, HEADS, LENGTH, HEAD_DIM)
    compiled = torch.compile(FUNCTIONS["attention"], backend=counter)
    compiled(x)
    grad(lambda y: FUNCTIONS["attention"](y).sum())(x)
    compiled(x)
    assert counter.frame_count == 1
