"""FlexAttention where PyTorch supports it: what it computes, and its reasons against everything else.

Compiling a kind of call takes ten seconds and more, so calls here share their kinds: six heads of eight numbers on two
key/value heads, more than one item and block.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import clearhead
from clearhead import masks
from clearhead.errors import KernelError
from clearhead.kernels import _flex as flex
from clearhead.positions import ALiBi

HEADS, KV_HEADS, DIM = 6, 2, 8
X = torch.randn(2, HEADS, 7, DIM, generator=torch.Generator().manual_seed(1))

runs_here = pytest.mark.skipif(
    bool(clearhead.explain(X, X, X).reasons["flex"]), reason="FlexAttention cannot be built on this machine"
)

BANDS = {
    "none": None,
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "window": masks.sliding_window(41, 3),
    "causal window": masks.causal() & masks.sliding_window(41, 0),
    "prefix": masks.prefix(77),
    "nobody sees anything": masks.prefix(0),
}
CELLS = {
    "prefix or causal": masks.causal() | masks.prefix(77),
    "an empty item": masks.lengths(torch.tensor([0, 211])),
    "other lengths": masks.lengths(torch.tensor([389, 211])) & masks.causal(),
    "padding": masks.keep(keys=torch.rand(2, 389, generator=torch.Generator().manual_seed(2)) > 0.5),
    "predicate": masks.mask_mod(lambda b, h, q, k: (q + k + b + h) % 3 != 0),
    "all but some": ~masks.sliding_window(100, 100),
}


@pytest.fixture(autouse=True, scope="module")
def _own_compilations() -> Iterator[None]:
    """Other files reset the compiler, which would leave copies here that are compiled again and again."""
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


def qkv(batch: int = 2, length: int = 307, count: int = 389) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, HEADS, length, DIM),
        torch.randn(batch, KV_HEADS, count, DIM),
        torch.randn(batch, KV_HEADS, count, DIM),
    )


def forced(*inputs: Tensor, mask: masks.Mask | None = None, **options: object) -> Tensor:
    with clearhead.use_kernel("flex"):
        return clearhead.attention(*inputs, mask, **options)


def expected(*inputs: Tensor, mask: masks.Mask | None = None, **options: object) -> Tensor:
    with clearhead.use_kernel("reference"):
        return clearhead.attention(*(tensor.double() for tensor in inputs), mask, **options)


def require_equal(*inputs: Tensor, mask: masks.Mask | None = None, **options: object) -> None:
    exact = expected(*inputs, mask=mask, **options)
    found = forced(*inputs, mask=mask, **options)
    assert found.dtype == inputs[0].dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * max(1.0, float(exact.abs().max())))


@runs_here
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str) -> None:
    require_equal(*qkv(), mask=BANDS[name])


@runs_here
@pytest.mark.parametrize("name", CELLS)
def test_other_masks(name: str) -> None:
    require_equal(*qkv(), mask=CELLS[name])


@runs_here
def test_documents() -> None:
    ids = torch.stack([torch.arange(389) // 97, torch.arange(389) // 131])
    require_equal(*qkv(length=389), mask=masks.documents(ids))
    require_equal(*qkv(length=389), mask=masks.documents(ids) & masks.causal())


@runs_here
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 1, 389), (1, HEADS, 307, 1), (2, HEADS, 307, 389)], ids=str)
def test_biases_of_other_shapes(shape: tuple[int, ...]) -> None:
    require_equal(*qkv(), mask=masks.bias(torch.randn(shape)) & masks.lengths(torch.tensor([389, 211])))


@runs_here
def test_a_soft_cap_and_a_bias() -> None:
    bias = masks.bias(torch.randn(307, 389))
    require_equal(*qkv(), mask=bias & masks.lengths(torch.tensor([389, 211])), softcap=2.0)
    hiding = torch.randn(307, 389).masked_fill(torch.rand(307, 389) < 0.3, -torch.inf)
    hiding[5] = -torch.inf
    require_equal(*qkv(), mask=masks.bias(hiding) & masks.bias(torch.randn(1, 389)), softcap=2.0)


@runs_here
def test_rows_that_see_nothing_are_zero_and_padding_does_not_leak() -> None:
    query, key, value = qkv()
    mask = masks.lengths(torch.tensor([0, 211]))
    exact = expected(query, key, value, mask=mask)
    key[0], value[0], key[1, :, 211:], value[1, :, 211:] = torch.nan, torch.inf, torch.inf, torch.nan
    query[0] = torch.nan
    found = forced(query, key, value, mask=mask)
    assert not found[0].any()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@runs_here
def test_positions_and_inputs_laid_out_otherwise() -> None:
    query, key, value = qkv()
    query, key = query.transpose(1, 2).contiguous().transpose(1, 2), key.mT.contiguous().mT
    require_equal(query, key, value, mask=masks.causal(), query_positions=82)
    places = torch.randperm(389)
    require_equal(query, key, value, mask=masks.causal(), query_positions=82, key_positions=places)
    inputs = [tensor[1] for tensor in (query, key, value)]
    with clearhead.use_kernel("flex"):
        alone = clearhead.attention(*inputs, masks.causal())
    torch.testing.assert_close(alone, forced(query, key, value, mask=masks.causal())[1])


@runs_here
def test_one_kind_is_compiled_once_for_all_sizes_and_numbers() -> None:
    forced(*qkv(), mask=masks.causal())
    before = counters["stats"]["unique_graphs"]
    for batch, length, count in [(3, 211, 401), (5, 499, 499), (2, 149, 157), (6, 257, 1009)]:
        for mask in (masks.causal(), masks.sliding_window(length // 3, 5), masks.prefix(count - 20), None):
            require_equal(*qkv(batch, length, count), mask=mask)
    assert counters["stats"]["unique_graphs"] == before


@runs_here
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 389), (2, 1, 1), (1, 5, 7), (3, 128, 128), (1, 129, 1)], ids=str)
def test_sizes_of_one_and_of_one_block(sizes: tuple[int, int, int]) -> None:
    require_equal(*qkv(*sizes), mask=masks.causal())
    require_equal(*qkv(*sizes), mask=masks.mask_mod(lambda b, h, q, k: (q + k + b + h) % 3 != 0))


@runs_here
@pytest.mark.slow
@pytest.mark.parametrize(("scale", "dim", "value_dim"), [(-0.3, 1, 3), (0.0, 17, 5), (4.0, 64, 19)])
def test_scales_and_head_sizes(scale: float, dim: int, value_dim: int) -> None:
    query, key, value = torch.randn(2, 3, 307, dim), torch.randn(2, 3, 389, dim), torch.randn(2, 3, 389, value_dim)
    require_equal(query, key, value, mask=masks.causal(), scale=scale)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_lse": True}, "it gives out no log-sum-exp"),
        ({"sinks": torch.zeros(HEADS)}, "it has no sinks"),
        ({"dropout_p": 0.5}, "it has no dropout"),
        ({"mask": ALiBi(HEADS)}, "a computed bias would have to be built whole, (B, H, L, S)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_reasons_of_a_call(options: dict[str, object], reason: str) -> None:
    assert clearhead.explain(X, X, X, **options).reasons["flex"] == (reason,)
    with pytest.raises(KernelError) as raised, clearhead.use_kernel("flex"):
        clearhead.attention(X, X, X, **options)
    assert str(raised.value).startswith(f"use_kernel('flex'): this kernel cannot run the call: {reason}. Leave")


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float64, "it computes in float32, not in float64"),
        (torch.bfloat16, "on the CPU it rounds weights to half precision, which can more than double the error"),
        (torch.float16, "on the CPU it rounds weights to half precision, which can more than double the error"),
    ],
    ids=str,
)
def test_reasons_of_a_dtype(dtype: torch.dtype, reason: str) -> None:
    x = X.to(dtype)
    assert clearhead.explain(x, x, x).reasons["flex"] == (reason,)


def test_reasons_of_gradients_and_sizes() -> None:
    x = X.clone().requires_grad_()
    assert clearhead.explain(x, X, X).reasons["flex"] == ("it has no backward on the CPU",)
    with torch.no_grad():
        assert clearhead.explain(x, X, X).reasons["flex"] == ()
    assert clearhead.explain(X[:, :, :0], X, X).reasons["flex"] == ("a size is 0",)


def test_reasons_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        assert clearhead.explain(X, X, X).reasons["flex"] == ("there is no C++ compiler to build it with",)
    monkeypatch.setattr("clearhead.kernels._flex.has_avx2", lambda: False)
    (reason,) = clearhead.explain(X, X, X).reasons["flex"]
    assert reason == "PyTorch builds it for x86 processors with AVX2 alone, on Linux and Windows"


def test_reasons_of_a_device() -> None:
    x = X.to("meta")
    assert "PyTorch has it for CPUs and CUDA devices only" in clearhead.explain(x, x, x).reasons["flex"]


def test_it_is_not_chosen_by_itself() -> None:
    for options in ({}, {"softcap": 3.0}, {"mask": masks.causal() & masks.sliding_window(2, 0)}):
        assert clearhead.explain(X, X, X, **options).kernel != "flex"


@runs_here
def test_it_takes_no_part_in_a_graph() -> None:
    with clearhead.use_kernel("flex"), pytest.raises(Exception, match="it compiles a graph of its own"):
        torch.compile(lambda x: clearhead.attention(x, x, x), backend="eager", fullgraph=True)(X)
