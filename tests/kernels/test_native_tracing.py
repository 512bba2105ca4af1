"""The native kernel inside `torch.compile`, `torch.export` and dispatch modes, and what it says to those it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.export import export

import clearhead
from clearhead import masks
from clearhead._call.request import Request
from clearhead._environment import read_environment
from clearhead._layer.plan import attend
from clearhead.kernels._native_arguments import NativeArguments
from clearhead.masks._grid import Offset
from tests.support.budgets import slow
from tests.support.native import needs_native

from . import graphs
from .graphs import LENGTHS, check_compiled, random

pytestmark = needs_native

# It refuses masks that differ between heads.
VARIANTS = graphs.VARIANTS | {"where": {"mask": masks.mask_mod(lambda b, h, q, k: (q + k) % 3 != b)}}


@pytest.fixture(autouse=True)
def _native(fresh_compiler: None) -> Iterator[None]:
    with clearhead.use_kernel("native"):
        yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_graph_for_all_lengths(variant: str) -> None:
    calls = ((random(length),) for length in LENGTHS)
    options = VARIANTS[variant]
    backend = check_compiled(lambda x: clearhead.attention(x, x, x, **options), calls, "clearhead.attention")
    assert (backend.graphs, backend.operators) == (1, 1)


@pytest.mark.parametrize("variant", ["lse", "sinks", *slow("plain", "causal", "softcap")])
def test_gradients(variant: str) -> None:
    options = VARIANTS[variant]

    def loss(x: Tensor) -> Tensor:
        result = clearhead.attention(x, x, x, **options)
        return sum(part.square().sum() for part in (result if isinstance(result, tuple) else (result,)))

    function = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in LENGTHS[:2]:
        x = random(length, grad=True)
        inputs = [x, *(option for option in options.values() if isinstance(option, Tensor))]
        torch.testing.assert_close(*(torch.autograd.grad(f(x), inputs) for f in (function, loss)))


def test_a_graph_drops_the_weights_of_a_part_that_reference_drops() -> None:
    def seeded(x: Tensor) -> Tensor:
        request = Request(dropout_p=0.5, seed=torch.tensor(42), offset=Offset(11, 2, 3, 5))
        return attend(x, x, x, request, read_environment()).output

    x = random(31, grad=True)
    found = torch.compile(seeded, backend="aot_eager", fullgraph=True)(x)
    with clearhead.use_kernel("reference"):
        expected = seeded(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_an_exported_graph_holds_pytorchs_own_operators() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return clearhead.attention(x, x, x, masks.causal())

    x = random(11)
    with pytest.raises(Exception, match="an exported graph holds PyTorch's own operators only"):
        export(Module(), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_keeps_pytorchs_rules(dtype: torch.dtype) -> None:
    query, key, value = (random(length).to(dtype).requires_grad_() for length in (11, 13, 13))
    visible = torch.rand(11, 13)[None, None] > 0.3
    arguments = tuple(NativeArguments(query, key, value, visible=visible, scale=0.5, low=-11, high=13, stop=13))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.clearhead.attention.default, arguments, test_utils=tests)


X = random(11)
PER_HEAD = masks.mask_mod(lambda b, h, q, k: k % 2 == h)


@pytest.mark.parametrize(
    ("x", "mask", "reason"),
    [
        (X.double(), None, "it computes in float32, and the tensors are torch.float64"),
        (X.to("meta"), None, "it runs on the CPU, and the tensors are on meta"),
        (X, PER_HEAD, "the mask differs between heads and would have to be built whole, (B, H, L, S)"),
    ],
)
def test_reasons(x: Tensor, mask: masks.Mask | None, reason: str) -> None:
    assert clearhead.explain(x, x, x, mask).reasons["native"] == (reason,)


def test_reasons_against_transforms() -> None:
    with pytest.raises(clearhead.errors.KernelError, match=r"cannot be transformed by torch\.func"):
        torch.func.grad(lambda y: clearhead.attention(y, y, y).sum())(X)
