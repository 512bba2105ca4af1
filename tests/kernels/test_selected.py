"""Selected keys: every kernel agrees with the formula in float64, gathers, and builds nothing of size (L, S)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._native import extension
from clearhead.kernels._gathered import gathers
from clearhead.masks._bound import bind
from clearhead.masks._grid import Grid
from tests.support.allocations import Allocations

B, H, HKV, L, S, D, DV, K = 2, 6, 2, 13, 97, 16, 11, 7
native = pytest.mark.skipif(extension is None, reason="the native kernel was not built")
KERNELS = [pytest.param("native", marks=native), "chunked"]
Extra = Callable[[], masks.Mask]


def lists(*shape: int, of: int, none: float = 0.2) -> Tensor:
    """Random numbers of keys, some −1, and the first one twice."""
    indices = torch.rand(*shape[:-1], of).argsort(-1)[..., : shape[-1]]
    indices = indices.masked_fill(torch.rand(indices.shape) < none, -1)
    indices[..., -1] = indices[..., 0]
    return indices


def inputs(dtype: torch.dtype = torch.float64, length: int = L, keys: int = S) -> list[Tensor]:
    shapes = (B, H, length, D), (B, HKV, keys, D), (B, HKV, keys, DV)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def results(kernel: str, tensors: list[Tensor], mask: masks.Mask, sinks: Tensor | None = None, **options: Any) -> Any:
    """Output and lse, and the gradients of all inputs from both."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    of_sinks = None if sinks is None else sinks.to(tensors[0].dtype).requires_grad_()
    torch.manual_seed(5)
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention(*leaves, mask, sinks=of_sinks, return_lse=True, **options)
    seen = lse > float("-inf")
    ramp = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    loss = (output.double() * ramp).sum() + lse.double()[seen].sin().sum()
    wanted = leaves if of_sinks is None else [*leaves, of_sinks]
    return [output.detach(), lse.detach().masked_fill(~seen, 0), *torch.autograd.grad(loss, wanted)]


def require_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for got, right in zip(found, expected, strict=True):
        assert float((got.double() - right).abs().max()) <= tolerance * float(right.abs().max().clamp_min(1e-30))


def either_half(*shape: int) -> Tensor:
    return torch.rand(*shape) > 0.3


CASES: dict[str, tuple[Callable[[], masks.Mask], dict[str, Any]]] = {
    "one list": (lambda: masks.selected(lists(B, L, K, of=S)), {}),
    "one item": (lambda: masks.selected(lists(1, L, K, of=S).int()), {}),
    "key heads": (lambda: masks.selected(lists(B, HKV, L, K, of=S)), {}),
    "query heads": (lambda: masks.selected(lists(1, H, L, K, of=S)), {}),
    "three of six heads": (lambda: masks.selected(lists(B, 3, L, K, of=S)), {}),
    "blocks": (lambda: masks.selected(lists(B, HKV, L, 3, of=10), block=10), {}),
    "causal": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.causal("bottom_right"), {}),
    "padding": (lambda: masks.lengths(torch.tensor([31, S])) & masks.selected(lists(B, L, K, of=S)), {}),
    "keep": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.keep(either_half(B, 1, L, S)), {}),
    "keep of heads": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.keep(either_half(1, H, L, S)), {}),
    "bias": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.bias(torch.randn(1, 1, 1, S)), {}),
    "bias of heads": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.bias(torch.randn(B, H, L, S)), {}),
    "rule": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.mask_mod(lambda b, h, q, k: (q + k) % 3 > 0), {}),
    "documents": (
        lambda: masks.selected(lists(B, S, K, of=S)) & masks.documents(torch.arange(S) // 40),
        {"length": S},
    ),
    "scattered documents": (
        lambda: masks.selected(lists(B, S, K, of=S)) & masks.documents(torch.arange(S) % 3),
        {"length": S},
    ),
    "scattered documents, blocks": (
        lambda: masks.selected(lists(B, S, 3, of=10), block=10) & masks.documents(torch.arange(S) % 3),
        {"length": S},
    ),
    "twice": (lambda: masks.selected(lists(B, L, K, of=S)) & masks.selected(lists(1, L, 40, of=S)), {}),
    "sinks": (lambda: masks.selected(lists(B, L, K, of=S)), {"sinks": torch.linspace(-2, 2, H)}),
    "sinks of queries": (
        lambda: masks.selected(lists(B, L, K, of=S)),
        {"sinks": torch.linspace(-2, 2, B * H * L).view(B, H, L)},
    ),
    "soft-cap": (lambda: masks.selected(lists(B, L, K, of=S)), {"softcap": 1.5, "scale": 0.7}),
    "dropout": (lambda: masks.selected(lists(B, L, K, of=S)), {"dropout_p": 0.3}),
    "nothing": (lambda: masks.selected(torch.zeros(B, L, 0, dtype=torch.long)), {}),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_formula(case: str, kernel: str) -> None:
    torch.manual_seed(0)
    make, options = CASES[case][0], dict(CASES[case][1])
    length = options.pop("length", L)
    tensors, mask = inputs(length=length), make()
    assert gathers(bind(mask, Grid(B, H, length, S, torch.device("cpu"))))
    expected = results("reference", tensors, mask, **options)
    require_close(results(kernel, [x.float() for x in tensors], mask, **options), expected, 1e-5)
    if kernel == "chunked":
        require_close(results(kernel, tensors, mask, **options), expected, 1e-10)


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_twice_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors, mask = inputs(dtype), masks.selected(lists(B, L, K, of=S))
    exact = results("reference", [x.double() for x in tensors], mask)
    errors = [
        [
            float((got.double() - right).abs().max())
            for got, right in zip(results(kernel, tensors, mask), exact, strict=True)
        ]
        for kernel in ("native", "reference")
    ]
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 2 * theirs + 1e-7


@native
@pytest.mark.parametrize(
    ("heads", "length", "keys", "listed"), [(1, 300, 3001, 301), (16, 19, 3001, 301), (4, 1, 9001, 900)]
)
def test_long_lists_in_blocks_of_keys_and_shared_by_threads(heads: int, length: int, keys: int, listed: int) -> None:
    torch.manual_seed(0)
    shapes = (1, heads, length, 64), (1, 1, keys, 64), (1, 1, keys, 64)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mask = masks.selected(lists(1, length, listed, of=keys).int())
    expected = results("reference", tensors, mask)
    require_close(results("native", [x.float() for x in tensors], mask), expected, 1e-5)


@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
def test_nan_in_keys_that_are_not_listed_reaches_nothing(kernel: str) -> None:
    torch.manual_seed(0)
    tensors = inputs(torch.float32)
    mask = masks.selected(lists(B, L, K, of=50)) & masks.lengths(torch.tensor([40, S]))
    clean = results(kernel, tensors, mask)
    for tensor in tensors[1:]:
        tensor[:, :, 50:] = float("nan")
        tensor[0, :, 40:] = float("inf")
    poisoned = results(kernel, tensors, mask)
    for got, right in zip(poisoned[:3], clean[:3], strict=True):
        assert torch.equal(got, right)
    for got in poisoned[3:]:
        assert got.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_without_a_key_are_zero(kernel: str) -> None:
    tensors, indices = inputs(torch.float32), lists(B, L, K, of=S)
    indices[:, 4] = -1
    found = results(kernel, tensors, masks.selected(indices))
    assert found[0][:, :, 4].eq(0).all()
    assert found[2][:, :, 4].eq(0).all()


@pytest.mark.parametrize("block", [1, 4])
def test_lists_of_most_keys_are_not_gathered(block: int) -> None:
    torch.manual_seed(0)
    tensors, mask = inputs(), masks.selected(lists(B, L, 60 // block, of=-(-S // block)), block=block)
    assert not gathers(bind(mask, Grid(B, H, L, S, torch.device("cpu"))))
    expected = results("reference", tensors, mask)
    require_close(results("chunked", tensors, mask), expected, 1e-10)
    require_close([clearhead.attention(*[x.float() for x in tensors], mask)], expected[:1], 1e-5)


def test_a_learnt_bias_beside_lists_has_its_gradient() -> None:
    torch.manual_seed(0)
    tensors, table = inputs(), torch.randn(1, H, L, S, dtype=torch.float64)
    gradients = []
    for kernel in ("reference", None):
        bias = table.clone().requires_grad_()
        mask = masks.bias(bias) & masks.selected(lists(B, L, K, of=S, none=0.0) * 0 + torch.arange(K))
        with clearhead.use_kernel(kernel) if kernel else torch.enable_grad():
            clearhead.attention(*tensors, mask).sin().sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-10)


@native
def test_no_tensor_grows_with_the_keys() -> None:
    """A mask of (L, S) would have 32 MB."""
    indices = lists(1, 1024, 64, of=2048).int()
    tensors = [torch.randn(1, n, m, 16) for n, m in ((2, 1024), (1, 32768), (1, 32768))]
    with torch.no_grad(), Allocations(*tensors, indices) as seen:
        clearhead.attention(*tensors, masks.selected(indices))
    assert seen.largest <= 4 * indices.numel(), seen.operation


@pytest.mark.parametrize("lists_of", ["packed", "prepared", "compiled", "vmap", "second derivatives"])
def test_other_ways_to_call(lists_of: str) -> None:
    torch.manual_seed(0)
    tensors, indices = inputs(), lists(B, L, K, of=S)
    mask = masks.selected(indices)
    expected = results("reference", tensors, mask)[0]
    if lists_of == "prepared":
        prepared = mask.prepare(L, S, batch_size=B, num_heads=H)
        found = clearhead.attention(*tensors, prepared)
        indices.fill_(-1)
    elif lists_of == "compiled":
        call = torch.compile(lambda q, k, v, i: clearhead.attention(q, k, v, masks.selected(i)), fullgraph=True)
        found = call(*[x.float() for x in tensors], indices)
        return require_close([found], [expected], 1e-5)
    elif lists_of == "vmap":
        found = torch.func.vmap(lambda q, k, v: clearhead.attention(q, k, v, mask))(*[x[None] for x in tensors])[0]
    elif lists_of == "packed":
        rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in tensors]
        starts = [torch.arange(0, B + 1) * n for n in (L, S)]
        offset = (torch.arange(B) * S)[:, None, None]
        packed = indices.where(indices < 0, indices + offset).flatten(0, 1)[None]
        found = clearhead.attention_varlen(*(x[0].transpose(0, 1) for x in rows), *starts, masks.selected(packed))
        found = found.unflatten(0, (B, L)).transpose(1, 2)
    else:
        query = tensors[0].requires_grad_()
        once = torch.autograd.grad(clearhead.attention(*tensors, mask).sin().sum(), query, create_graph=True)[0]
        assert torch.autograd.grad(once.sum(), query)[0].isfinite().all()
        return None
    require_close([found], [expected], 1e-10)
    return None
