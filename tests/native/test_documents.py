"""Documents end to end, each as if it were called alone, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._call.spec import Layout
from clearhead.kernels._native_arguments import NativeArguments
from clearhead.kernels._native_plan import NativePlan
from tests.support.native import needs_native, threads

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 3, 13, 7
ROWS = [61, 0, 1, 211, 5, 7, 3, 0]
KEYS = [61, 3, 17, 307, 2, 0, 1301, 0]

pytestmark = needs_native

BANDS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"high": 0},
    "window": {"low": -31, "high": 5},
}
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "soft-cap": {"softcap": 1.5}}


def starts(lengths: list[int], before: int = 0) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).add(before)


def inputs(dtype: torch.dtype, rows: list[int] = ROWS, keys: list[int] = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = ((HEADS, sum(rows), DIM), (KV_HEADS, sum(keys), DIM), (KV_HEADS, sum(keys), VALUE_DIM))
    query, key, value = (torch.randn(1, *shape).to(dtype) for shape in shapes)
    return query, key, value


def made(tensors: tuple[Tensor, ...], documents: int = len(ROWS), **options: Any) -> NativePlan:
    return NativePlan(
        tensors[0].dtype, *map(Layout.of, tensors), scale=0.4, differentiable=True, sequences=documents, **options
    )


def arguments_of(tensors: tuple[Tensor, ...], sinks: Tensor | None = None, **more: Tensor) -> NativeArguments:
    given: dict[str, Any] = {"cu_seqlens_q": starts(ROWS), "cu_seqlens_k": starts(KEYS), **more}
    return NativeArguments(*tensors, sinks=sinks, **given)  # type: ignore[arg-type]


def run(plan: NativePlan, arguments: NativeArguments, gradient: Tensor) -> dict[str, Tensor]:
    lse = plan.empty_lse(arguments.query)
    output = plan.forward(arguments, lse)
    of_lse = torch.full(lse.shape, 1 / 3)
    dq, dk, dv, correction = plan.backward(arguments, output, lse, gradient, of_lse)
    return {"output": output, "lse": lse, "query": dq, "key": dk, "value": dv, "correction": correction}


def one_by_one(
    tensors: tuple[Tensor, ...],
    gradient: Tensor,
    band: dict[str, Any],
    options: dict[str, Any],
    sinks: Tensor | None,
) -> dict[str, Tensor]:
    """What `reference` computes of each document in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    cu_q, cu_k = starts(ROWS).tolist(), starts(KEYS).tolist()
    outputs, lses = [], []
    for d in range(len(ROWS)):
        rows, used = slice(cu_q[d], cu_q[d + 1]), slice(cu_k[d], cu_k[d + 1])
        query, key, value = leaves[0][:, :, rows], leaves[1][:, :, used], leaves[2][:, :, used]
        low, high = band.get("low", -(10**4)), band.get("high", 10**4)
        seen = torch.arange(query.shape[2])[:, None]
        mask = (torch.arange(key.shape[2]) - seen >= low) & (torch.arange(key.shape[2]) - seen <= high)
        with clearhead.use_kernel("reference"):
            output, lse = clearhead.attention(
                query, key, value, masks.keep(mask), scale=0.4, sinks=sinks, return_lse=True, **options
            )
        outputs.append(output)
        lses.append(lse)
    output, lse = torch.cat(outputs, 2), torch.cat(lses, 2)
    loss = (output * gradient.double()).sum() + lse[lse.isfinite()].sum() / 3
    found = torch.autograd.grad(loss, leaves)
    return {"output": output.detach(), "lse": lse.detach(), **dict(zip(("query", "key", "value"), found, strict=True))}


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, expected in exact.items():
        hidden = expected.isinf()
        assert torch.equal(found[name].isinf(), hidden), name
        difference = (found[name].double() - expected)[~hidden].abs().max()
        assert difference <= tolerance * max(1.0, float(expected[~hidden].abs().max())), f"{name}: {difference}"


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, HEADS)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_equal_a_loop_over_the_documents(
    band: dict[str, Any], options: dict[str, Any], sinks: Tensor | None, instructions: str
) -> None:
    tensors = inputs(torch.float32)
    gradient = torch.randn(1, HEADS, sum(ROWS), VALUE_DIM)
    found = run(made(tensors, **band, **options), arguments_of(tensors, sinks), gradient)
    assert_close(found, one_by_one(tensors, gradient, band, options, sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, instructions: str) -> None:
    tensors = inputs(dtype)
    gradient = torch.randn(1, HEADS, sum(ROWS), VALUE_DIM).to(dtype)
    found = run(made(tensors, high=0), arguments_of(tensors), gradient)
    assert_close(found, one_by_one(tensors, gradient, BANDS["causal"], {}, None), 1e-2)


def test_heads_side_by_side(instructions: str) -> None:
    tensors = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs(torch.float32))
    gradient = torch.randn(1, HEADS, sum(ROWS), VALUE_DIM)
    found = run(made(tensors, high=0), arguments_of(tensors), gradient)
    assert_close(found, one_by_one(tensors, gradient, BANDS["causal"], {}, None))


@pytest.mark.parametrize("poisoned", range(4))
@pytest.mark.parametrize("count", [1, 3])
def test_nan_stays_in_its_document(poisoned: int, count: int, instructions: str) -> None:
    """In query, key, value or the output's gradient."""
    rows = keys = [37, 5, 64, 1]
    tensors = (*inputs(torch.float32, rows, keys), torch.randn(1, HEADS, sum(rows), VALUE_DIM))
    cu = starts(rows)
    with threads(count):
        plan = made(tensors[:3], documents=4, high=0)
        clean = run(plan, arguments_of(tensors[:3], cu_seqlens_q=cu, cu_seqlens_k=cu), tensors[3])
        tensors[poisoned][:, :, 37:42] = torch.nan
        found = run(plan, arguments_of(tensors[:3], cu_seqlens_q=cu, cu_seqlens_k=cu), tensors[3])
    for name, tensor in found.items():
        rest = [torch.cat([x[:, :, :37], x[:, :, 42:]], 2) for x in (tensor, clean[name])]
        torch.testing.assert_close(*rest, rtol=0, atol=1e-5)


def test_what_is_refused() -> None:
    tensors = inputs(torch.float32)
    with pytest.raises(ValueError, match="documents lie in a batch of 1"):
        made(tuple(tensor.expand(2, -1, -1, -1) for tensor in tensors))
    with pytest.raises(ValueError, match="documents take no tensors of masks"):
        made(tensors, visible=((1, 1, 1, sum(KEYS)), (0, 0, 0, 1)))
    plan = made(tensors)
    too_short = starts([*ROWS[:-2], ROWS[-2] - 1, 0])
    for wrong in (starts(ROWS, before=1), starts(ROWS).flip(0), starts(ROWS, before=-1), too_short):
        with pytest.raises(
            ValueError, match="cu_seqlens: starts of documents have to rise from 0 to the number of all"
        ):
            plan.forward(arguments_of(tensors, cu_seqlens_q=wrong))
    with pytest.raises(ValueError, match="cu_seqlens"):
        plan.forward(NativeArguments(*tensors))
    with pytest.raises(ValueError, match="statistics are not computed for documents"):
        plan.statistics(arguments_of(tensors))


def test_the_same_as_a_batch() -> None:
    """Bits and all, dropout too."""
    torch.manual_seed(5)
    batch = [torch.randn(4, HEADS, 61, DIM) for _ in range(3)]
    packed = tuple(tensor.transpose(0, 1).reshape(1, HEADS, 4 * 61, DIM) for tensor in batch)
    cu = torch.arange(5) * 61
    arguments = arguments_of(packed, seed=torch.tensor(3), cu_seqlens_q=cu, cu_seqlens_k=cu)
    output = made(packed, documents=4, high=0, dropout_p=0.2).forward(arguments)
    with clearhead.use_kernel("chunked"):
        plain = clearhead.attention(*batch, masks.causal(), scale=0.4)
    undropped = made(packed, documents=4, high=0).forward(arguments._replace(seed=None))
    one = NativePlan(torch.float32, *map(Layout.of, batch), scale=0.4, high=0, dropout_p=0.2)
    expected = one.forward(NativeArguments(*batch, seed=torch.tensor(3)))
    assert torch.equal(output.view(HEADS, 4, 61, DIM).transpose(0, 1), expected)
    torch.testing.assert_close(undropped.view(HEADS, 4, 61, DIM).transpose(0, 1), plain, rtol=0, atol=1e-5)
