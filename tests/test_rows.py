"""Documents end to end, padded and jagged: the same rows on every kernel, and nothing that leaks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import attention_varlen, masks
from clearhead.errors import KernelError
from clearhead.masks import Mask

H, KV, D, DV = 6, 3, 5, 7
QUERIES, KEYS = [3, 0, 5, 1, 2], [4, 2, 5, 0, 11]
T, TK = sum(QUERIES), sum(KEYS)
EXACT = (torch.float64, 1e-10)
SINGLE = (torch.float32, 1e-5)

#: Each with the precision that it computes in; ``None`` leaves the choice.
KERNELS: dict[str, tuple[str | None, tuple[torch.dtype, float]]] = {
    "chosen": (None, SINGLE),
    "native": ("native", SINGLE),
    "sdpa": ("sdpa", EXACT),
    "chunked": ("chunked", EXACT),
    "reference": ("reference", EXACT),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(dtype: torch.dtype, dim: int = DV) -> list[Tensor]:
    shapes = ((T, H, D), (TK, KV, D), (TK, KV, dim))
    return [drawn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def forced(kernel: str) -> Any:
    name = KERNELS[kernel][0]
    return nullcontext() if name is None else clearhead.use_kernel(name)


def one_by_one(
    given: Sequence[Tensor], queries: list[int], keys: list[int], mask_of: Callable[[slice, slice], Any], **more: Any
) -> tuple[Tensor, Tensor]:
    """Every document of these lengths alone, by the reference kernel."""
    found: list[tuple[Tensor, Tensor]] = []
    query_ends, key_ends = ends(queries).tolist(), ends(keys).tolist()
    with clearhead.use_kernel("reference"):
        for document in range(len(queries)):
            rows = slice(query_ends[document], query_ends[document + 1])
            columns = slice(key_ends[document], key_ends[document + 1])
            q, k, v = (x[part].transpose(0, 1) for x, part in zip(given, (rows, columns, columns), strict=True))
            output, lse = clearhead.attention(q, k, v, mask_of(rows, columns), return_lse=True, **more)
            found.append((output.transpose(0, 1), lse.transpose(0, 1)))
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def whole(seed: int) -> Tensor:
    """Which of T × Tk may attend; the first query of the third document sees no key."""
    shown = torch.rand(T, TK, generator=torch.Generator().manual_seed(seed)) < 0.7
    shown[3] = False
    return shown


#: A mask of the whole call, and the mask of one document in it.
Case = tuple[Callable[[Tensor], Mask | Tensor | None], Callable[[Tensor, slice, slice], Any]]
MASKS: dict[str, Case] = {
    "none": (lambda bias: None, lambda bias, rows, columns: None),
    "causal": (lambda bias: masks.causal(), lambda bias, rows, columns: masks.causal()),
    "window": (
        lambda bias: masks.causal() & masks.sliding_window(2, 1),
        lambda bias, rows, columns: masks.causal() & masks.sliding_window(2, 1),
    ),
    "prefix": (
        lambda bias: masks.causal() | masks.prefix(2),
        lambda bias, rows, columns: masks.causal() | masks.prefix(2),
    ),
    "bool tensor": (lambda bias: whole(2), lambda bias, rows, columns: whole(2)[rows, columns]),
    "keep": (
        lambda bias: masks.keep(whole(2)) & masks.causal(),
        lambda bias, rows, columns: masks.keep(whole(2)[rows, columns]) & masks.causal(),
    ),
    "keys": (
        lambda bias: masks.keep(keys=whole(4)[:1]),
        lambda bias, rows, columns: masks.keep(keys=whole(4)[:1, columns]),
    ),
    "bias": (lambda bias: masks.bias(bias[0]), lambda bias, rows, columns: masks.bias(bias[0, rows, columns])),
    "bias per head": (
        lambda bias: masks.bias(bias[None]) & masks.sliding_window(3, 3),
        lambda bias, rows, columns: masks.bias(bias[None, :, rows, columns]) & masks.sliding_window(3, 3),
    ),
}


@every_kernel
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"sinks": True}, {"scale": 0.3}], ids=lambda more: str([*more]))
def test_against_a_loop_over_documents(kernel: str, mask: str, more: dict[str, Any]) -> None:
    """Outputs, log-sum-exps, and gradients of the inputs, the sinks and the bias."""
    dtype, tolerance = KERNELS[kernel][1]
    make, of_document = MASKS[mask]
    fused = kernel == "sdpa"  # it gives no lse, and takes values of the keys' size only
    dim = D if fused else DV

    def results(dtype: torch.dtype, compute: Callable[..., Any]) -> list[Tensor]:
        given, bias = packed(dtype, dim), drawn(H, T, TK, dtype=dtype).requires_grad_()
        sinks = torch.linspace(-1, 1, H, dtype=dtype).requires_grad_()
        output, lse = compute(given, bias, **({**more, "sinks": sinks} if "sinks" in more else more))
        leaves = [*given, *([bias] if "bias" in mask else []), *([sinks] if "sinks" in more else [])]
        loss = (output * drawn(*output.shape, dtype=dtype)).sum()
        loss = loss if fused else loss + lse.masked_fill(lse.isinf(), 0).sin().sum()
        return [output, lse, *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)]

    def together(given: list[Tensor], bias: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        with forced(kernel):
            found = attention_varlen(*given, ends(QUERIES), ends(KEYS), make(bias), return_lse=not fused, **more)
        return (found, torch.zeros(T, H)) if isinstance(found, Tensor) else found

    def alone(given: list[Tensor], bias: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        output, lse = one_by_one(given, QUERIES, KEYS, lambda rows, columns: of_document(bias, rows, columns), **more)
        return output, torch.zeros(T, H) if fused else lse

    try:
        found = results(dtype, together)
    except KernelError as error:
        pytest.skip(str(error))
    for mine, theirs in zip(found, results(torch.float64, alone), strict=True):
        infinite = theirs.isinf()
        assert torch.equal(mine.isinf(), infinite)
        error = (mine.double() - theirs)[~infinite].abs().max()
        assert error <= tolerance * max(1.0, float(theirs.detach()[~infinite].abs().max()))


@every_kernel
@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.keep(torch.ones(T, TK, dtype=torch.bool))], ids=["none", "causal", "keep"]
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_nothing_leaks_between_documents(kernel: str, mask: Any, poison: float, where: int) -> None:
    """NaN or inf in one document's queries, keys and values leaves outputs and gradients of the others alone."""
    dtype = KERNELS[kernel][1][0]
    clean = packed(dtype, D)
    rows, columns = torch.zeros(T, dtype=torch.bool), torch.zeros(TK, dtype=torch.bool)
    rows[ends(QUERIES)[where] : ends(QUERIES)[where + 1]] = True
    columns[ends(KEYS)[where] : ends(KEYS)[where + 1]] = True
    poisoned = [x.detach().clone() for x in clean]
    for x, own in zip(poisoned, (rows, columns, columns), strict=True):
        x[own, 1:] = poison

    def results(given: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in given]
        with forced(kernel):
            output = attention_varlen(*leaves, ends(QUERIES), ends(KEYS), mask)
        return output, *torch.autograd.grad(output[~rows].square().sum(), leaves)

    found, expected = results(poisoned), results(clean)
    for mine, theirs, own in zip(found, expected, (rows, rows, columns, columns), strict=True):
        torch.testing.assert_close(mine[~own], theirs[~own], rtol=1e-5, atol=1e-6)


def as_padded(parts: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


@every_kernel
@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_leaks_between_rows_of_a_module(kernel: str, layout: str, causal: bool) -> None:
    dtype = KERNELS[kernel][1][0]
    module = clearhead.MultiHeadAttention(12, H, num_kv_heads=KV, dtype=dtype)
    lengths = [5, 2, 7]
    parts = [drawn(n, 12, dtype=dtype) for n in lengths]

    def results(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        mask = masks.causal() if causal else None
        if layout == "jagged":
            x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
            with forced(kernel):
                outputs = module(x, mask=mask).unbind()
        else:
            x, counts = as_padded(parts).requires_grad_(), torch.tensor(lengths)
            mine = masks.lengths(counts, counts)
            with forced(kernel):
                batch = module(x, mask=mine if mask is None else mine & mask)
            outputs = [row[:n] for row, n in zip(batch, lengths, strict=True)]
        others = torch.cat([outputs[0], outputs[2]])
        (gradient,) = torch.autograd.grad(others.square().sum(), x)
        rows = gradient.unbind() if layout == "jagged" else [row[:n] for row, n in zip(gradient, lengths, strict=True)]
        return others, torch.cat([rows[0], rows[2]])

    found = results([parts[0], torch.full_like(parts[1], torch.nan), parts[2]])
    for mine, theirs in zip(found, results(parts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@every_kernel
def test_padded_varlen_and_jagged_are_the_same(kernel: str) -> None:
    dtype, tolerance = KERNELS[kernel][1]
    module = clearhead.MultiHeadAttention(12, H, num_kv_heads=KV, softcap=3.0, sinks=True, dtype=dtype)
    lengths, counts = [5, 0, 7], torch.tensor([5, 0, 7])
    parts = [drawn(n, 12, dtype=dtype) for n in lengths]
    x = torch.cat(parts)
    with forced(kernel):
        try:
            batch = module(as_padded(parts), mask=masks.lengths(counts, counts) & masks.causal())
        except KernelError as error:
            pytest.skip(str(error))
        jagged = module(torch.nested.nested_tensor(parts, layout=torch.jagged), mask=masks.causal()).values()
        q, k, v = (
            project(x).unflatten(1, (-1, 2)) for project in (module.q_proj, module.k_proj, module.v_proj)
        )  # (T, heads, 2)
        more = {"softcap": 3.0, "sinks": module.sinks}
        varlen = attention_varlen(q, k, v, ends(lengths), ends(lengths), masks.causal(), **more)
    padded = torch.cat([row[:n] for row, n in zip(batch, lengths, strict=True)])
    for found in (jagged, module.out_proj(varlen.flatten(1))):
        torch.testing.assert_close(found, padded, rtol=tolerance, atol=tolerance)


@every_kernel
def test_dropout_drops_weights_within_documents(kernel: str) -> None:
    """Values are unit vectors, so that outputs are the dropped weights, (T, H, Tk)."""
    dtype = KERNELS[kernel][1][0]
    query, key, _ = packed(dtype)
    values = torch.eye(TK, dtype=dtype)[:, None].expand(TK, KV, TK)
    bounds = ends(QUERIES), ends(KEYS)
    with forced(kernel):
        try:
            weights = attention_varlen(query, key, values, *bounds)
            dropped = attention_varlen(query, key, values, *bounds, dropout_p=0.25)
        except KernelError as error:
            pytest.skip(str(error))
        nothing = attention_varlen(query, key, values, *bounds, dropout_p=1.0)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert 0.6 < float(kept.sum() / (weights != 0).sum()) < 0.9
    assert not bool(nothing.any())
    (gradient,) = torch.autograd.grad(dropped.sum(), query)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("mask", [None, masks.keep(torch.ones(T, TK, dtype=torch.bool))])
@pytest.mark.parametrize("kernel", ["native", "chunked", None])
def test_all_kernels_drop_the_same_weights_of_documents(kernel: str | None, mask: Mask | None) -> None:
    query, key, _ = packed(torch.float32)
    values = torch.eye(TK)[:, None].expand(TK, KV, TK)
    found: list[Tensor] = []
    for name in ("reference", kernel):
        torch.manual_seed(5)
        with nullcontext() if name is None else clearhead.use_kernel(name):
            found.append(attention_varlen(query, key, values, ends(QUERIES), ends(KEYS), mask, dropout_p=0.5))
    torch.testing.assert_close(found[1], found[0])


@every_kernel
@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 0], [3, 0]), ([2, 1], [0, 0]), ([1] * 5, [1] * 5)])
def test_empty_documents(kernel: str, lengths: tuple[list[int], list[int]]) -> None:
    dtype = KERNELS[kernel][1][0]
    queries, keys = lengths
    query = torch.ones(sum(queries), H, D, dtype=dtype, requires_grad=True)
    key = torch.ones(sum(keys), KV, D, dtype=dtype, requires_grad=True)
    with forced(kernel):
        try:
            output = attention_varlen(query, key, key, ends(queries), ends(keys), masks.causal())
        except KernelError as error:
            assert sum(queries) * sum(keys) == 0
            pytest.skip(str(error))
    seen = 1.0 if keys == [1] * 5 else 0.0
    torch.testing.assert_close(output, torch.full_like(query, seen).detach(), rtol=1e-6, atol=0)
    assert all(bool(each.isfinite().all()) for each in torch.autograd.grad(output.sum(), (query, key)))


def test_calls_in_a_row_with_other_boundaries() -> None:
    """As many documents and tokens, so that one plan computes them all."""
    given = packed(torch.float32, D)
    for queries in (QUERIES, [0, 0, 11, 0, 0], [11, 0, 0, 0, 0], [2, 3, 1, 4, 1]):
        found = attention_varlen(*given, ends(queries), ends(KEYS), masks.causal())
        with clearhead.use_kernel("reference"):
            expected = attention_varlen(*(x.double() for x in given), ends(queries), ends(KEYS), masks.causal())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    boundaries = ends(QUERIES).int()
    before = attention_varlen(*given, boundaries, ends(KEYS))
    boundaries[1] = 1
    assert not torch.equal(attention_varlen(*given, boundaries, ends(KEYS)), before)


def test_second_derivatives_and_gradients_at_once() -> None:
    given = packed(torch.float64)
    bounds = ends(QUERIES), ends(KEYS)

    def attend(*given: Tensor) -> Tensor:
        return attention_varlen(*given, *bounds, masks.causal())

    assert torch.autograd.gradcheck(attend, given, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, given, fast_mode=True)
    singles = [x.detach().float().requires_grad_() for x in given]
    penalties: list[tuple[Tensor, ...]] = []
    for leaves in (given, singles):
        first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        penalties.append(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves))
    for exact, found in zip(*penalties, strict=True):
        assert (exact - found.double()).abs().max() <= 1e-5 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    given, bounds = packed(torch.float32), (ends(QUERIES), ends(KEYS))
    half = attention_varlen(*(x.to(dtype) for x in given), *bounds)
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), attention_varlen(*given, *bounds), rtol=3e-2, atol=3e-2)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(attention_varlen(*given, *bounds), half)


def test_second_derivatives_drop_the_same_weights() -> None:
    x, bounds = torch.randn(13, 2, 8), torch.tensor([0, 5, 13])
    gradients: list[Tensor] = []
    for create_graph in (False, True):
        query = x.clone().requires_grad_()
        torch.manual_seed(3)
        output = clearhead.attention_varlen(query, query, query, bounds, bounds, masks.causal(), dropout_p=0.5)
        gradients += torch.autograd.grad(output.square().sum(), query, create_graph=create_graph)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-4)


def test_running_lengths_of_any_stride_are_read_once() -> None:
    x, bounds = torch.randn(7, 2, 4, requires_grad=True), torch.tensor([0, 1, 3, 1, 7, 1])[::2]
    output = clearhead.attention_varlen(x, x, x, bounds, bounds)
    expected = clearhead.attention_varlen(x, x, x, bounds.clone(), bounds.clone())
    assert torch.equal(output, expected)
    (exact,) = torch.autograd.grad(expected.square().sum(), x)
    bounds[1] = 5  # after the forward pass
    (found,) = torch.autograd.grad(output.square().sum(), x)
    assert torch.equal(found, exact)


def test_a_prepared_mask_is_refused() -> None:
    x, bounds = torch.randn(5, 2, 4), torch.tensor([0, 5])
    with pytest.raises(clearhead.errors.ArgumentError, match=r"mask: expected a mask that is not prepared"):
        clearhead.attention_varlen(x, x, x, bounds, bounds, masks.causal().prepare(5))
