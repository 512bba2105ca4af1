"""Packed, padded and jagged sequences: the same rows on every kernel, and nothing leaks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import attention_varlen, masks
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, KernelError, ShapeError
from clearhead.masks import Mask
from tests.support.budgets import in_turn

H, KV, D, DV = 6, 3, 5, 7
QUERIES, KEYS = [3, 0, 5, 1, 2], [4, 2, 5, 0, 11]
T, TK = sum(QUERIES), sum(KEYS)
EXACT = (torch.float64, 1e-10)
SINGLE = (torch.float32, 1e-5)

#: The name of a kernel, or ``None`` for the chosen one, and its precision.
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
    operands: Sequence[Tensor], queries: list[int], keys: list[int], mask_of: Callable[[slice, slice], Any], **more: Any
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of every sequence of these lengths alone, by the reference kernel."""
    results: list[tuple[Tensor, Tensor]] = []
    query_ends, key_ends = ends(queries).tolist(), ends(keys).tolist()
    with clearhead.use_kernel("reference"):
        for place in range(len(queries)):
            rows, columns = slice(*query_ends[place : place + 2]), slice(*key_ends[place : place + 2])
            q, k, v = (x[part].transpose(0, 1) for x, part in zip(operands, (rows, columns, columns), strict=True))
            output, lse = clearhead.attention(q, k, v, mask_of(rows, columns), return_lse=True, **more)
            results.append((output.transpose(0, 1), lse.transpose(0, 1)))
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def visible(seed: int) -> Tensor:
    """A bool mask (T, Tk). The first query of the third sequence sees no key."""
    sees = torch.rand(T, TK, generator=torch.Generator().manual_seed(seed)) < 0.7
    sees[3] = False
    return sees


EVERY = slice(None)
#: Masks of the packed call, cut to the rows and columns of one sequence.
MASKS: dict[str, Callable[[Tensor, slice, slice], Mask | Tensor | None]] = {
    "none": lambda bias, rows, columns: None,
    "causal": lambda bias, rows, columns: masks.causal(),
    "window": lambda bias, rows, columns: masks.causal() & masks.sliding_window(2, 1),
    "prefix": lambda bias, rows, columns: masks.causal() | masks.prefix(2),
    "blocks": lambda bias, rows, columns: masks.block_causal(3),
    "bool tensor": lambda bias, rows, columns: visible(2)[rows, columns],
    "keep": lambda bias, rows, columns: masks.keep(visible(2)[rows, columns]) & masks.causal(),
    "keys": lambda bias, rows, columns: masks.keep(keys=visible(4)[:1, columns]),
    "bias": lambda bias, rows, columns: masks.bias(bias[0, rows, columns]),
    "bias per head": lambda bias, rows, columns: masks.bias(bias[None, :, rows, columns]) & masks.sliding_window(3, 3),
}


@in_turn({"kernel": KERNELS, "mask": MASKS}, {"more": [{}, {"softcap": 2.0}, {"sinks": True}, {"scale": 0.3}]})
def test_against_a_loop_over_sequences(kernel: str, mask: str, more: dict[str, Any]) -> None:
    """Outputs, log-sum-exps, and gradients of the inputs, the sinks and the bias."""
    dtype, tolerance = KERNELS[kernel][1]
    mask_of = MASKS[mask]
    fused = kernel == "sdpa"  # it returns no lse, and needs Dv = D
    dim = D if fused else DV

    def results(dtype: torch.dtype, compute: Callable[..., Any]) -> list[Tensor]:
        operands, bias = packed(dtype, dim), drawn(H, T, TK, dtype=dtype).requires_grad_()
        sinks = torch.linspace(-1, 1, H, dtype=dtype).requires_grad_()
        output, lse = compute(operands, bias, **({**more, "sinks": sinks} if "sinks" in more else more))
        leaves = [*operands, *([bias] if "bias" in mask else []), *([sinks] if "sinks" in more else [])]
        loss = (output * drawn(*output.shape, dtype=dtype)).sum()
        loss = loss if fused else loss + lse.masked_fill(lse.isinf(), 0).sin().sum()
        return [output, lse, *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)]

    def together(operands: list[Tensor], bias: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        rule, bounds = mask_of(bias, EVERY, EVERY), (ends(QUERIES), ends(KEYS))
        with forced(kernel):
            if fused:
                return attention_varlen(*operands, *bounds, rule, **more), torch.zeros(T, H)
            return attention_varlen(*operands, *bounds, rule, return_lse=True, **more)

    def alone(operands: list[Tensor], bias: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        output, lse = one_by_one(operands, QUERIES, KEYS, lambda *places: mask_of(bias, *places), **more)
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


@in_turn(
    {
        "kernel": KERNELS,
        "mask": [None, masks.causal(), masks.keep(torch.ones(T, TK, dtype=torch.bool))],
        "where": [0, 2, 4],
    },
    {"poison": [torch.nan, torch.inf, -torch.inf]},
)
def test_nothing_leaks_between_sequences(kernel: str, mask: Any, poison: float, where: int) -> None:
    """NaN or inf in one sequence does not reach outputs and gradients of the others."""
    dtype = KERNELS[kernel][1][0]
    clean = packed(dtype, D)
    rows, columns = torch.zeros(T, dtype=torch.bool), torch.zeros(TK, dtype=torch.bool)
    rows[ends(QUERIES)[where] : ends(QUERIES)[where + 1]] = True
    columns[ends(KEYS)[where] : ends(KEYS)[where + 1]] = True
    poisoned = [x.detach().clone() for x in clean]
    for x, tokens in zip(poisoned, (rows, columns, columns), strict=True):
        x[tokens, 1:] = poison

    def results(operands: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in operands]
        with forced(kernel):
            output = attention_varlen(*leaves, ends(QUERIES), ends(KEYS), mask)
        return output, *torch.autograd.grad(output[~rows].square().sum(), leaves)

    found, expected = results(poisoned), results(clean)
    for mine, theirs, tokens in zip(found, expected, (rows, rows, columns, columns), strict=True):
        torch.testing.assert_close(mine[~tokens], theirs[~tokens], rtol=1e-5, atol=1e-6)


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_padded_and_jagged_rows_of_a_module_are_equal_and_nothing_leaks(kernel: str, causal: bool) -> None:
    dtype = KERNELS[kernel][1][0]
    module = clearhead.MultiHeadAttention(12, H, num_kv_heads=KV, dtype=dtype)
    lengths = [5, 2, 7]
    sequences = [drawn(n, 12, dtype=dtype) for n in lengths]

    def of_each(batch: Tensor) -> list[Tensor]:
        return [row[:n] for row, n in zip(batch.unbind(), lengths, strict=True)]

    def results(sequences: list[Tensor], layout: str) -> tuple[Tensor, Tensor]:
        mask, counts = masks.causal() if causal else None, torch.tensor(lengths)
        if layout == "jagged":
            x = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
        else:
            x = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).requires_grad_()
            mask = masks.lengths(counts, counts) & (mask or masks.lengths(counts))
        with forced(kernel):
            first, _, last = of_each(module(x, mask=mask))
        (gradient,) = torch.autograd.grad(first.square().sum() + last.square().sum(), x)
        return torch.cat([first, last]), torch.cat(of_each(gradient)[::2])

    poisoned = [sequences[0], torch.full_like(sequences[1], torch.nan), sequences[2]]
    for layout in ("padded", "jagged"):
        torch.testing.assert_close(results(poisoned, layout), results(sequences, "padded"), rtol=1e-5, atol=1e-6)


def dropped(dropout_p: float, dtype: torch.dtype = torch.float32, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """The dropped weights (T, H, Tk), which are the outputs for unit vectors as values; and the query."""
    query, key, _ = packed(dtype)
    values = torch.eye(TK, dtype=dtype)[:, None].expand(TK, KV, TK)
    torch.manual_seed(5)
    return attention_varlen(query, key, values, ends(QUERIES), ends(KEYS), mask, dropout_p=dropout_p), query


@every_kernel
def test_dropout_drops_weights_within_sequences(kernel: str) -> None:
    dtype = KERNELS[kernel][1][0]
    with forced(kernel):
        try:
            (weights, _), (found, query), (nothing, _) = (dropped(p, dtype) for p in (0.0, 0.25, 1.0))
        except KernelError as error:
            pytest.skip(str(error))
    torch.testing.assert_close(found[found != 0], weights[found != 0] / 0.75)
    assert 0.6 < float((found != 0).sum() / (weights != 0).sum()) < 0.9
    assert not bool(nothing.any())
    (gradient,) = torch.autograd.grad(found.sum(), query)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("mask", [None, masks.keep(torch.ones(T, TK, dtype=torch.bool))])
@pytest.mark.parametrize("kernel", ["native", "chunked", "chosen"])
def test_all_kernels_drop_the_same_weights(kernel: str, mask: Mask | None) -> None:
    with forced(kernel):
        found, _ = dropped(0.5, mask=mask)
    with clearhead.use_kernel("reference"):
        torch.testing.assert_close(found, dropped(0.5, mask=mask)[0])


@every_kernel
@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 0], [3, 0]), ([2, 1], [0, 0]), ([1] * 5, [1] * 5)])
def test_empty_sequences(kernel: str, lengths: tuple[list[int], list[int]]) -> None:
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
    value = 1.0 if keys == [1] * 5 else 0.0
    torch.testing.assert_close(output, torch.full_like(query, value).detach(), rtol=1e-6, atol=0)
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(output.sum(), (query, key)))


def test_calls_in_a_row_with_other_boundaries() -> None:
    """Equal numbers of sequences and tokens share one plan, and no call reads the values of the mask of another."""
    operands = packed(torch.float32, D)
    for seed, queries in enumerate((QUERIES, [0, 0, 11, 0, 0], [11, 0, 0, 0, 0], [2, 3, 1, 4, 1], QUERIES)):
        for mask in (masks.causal(), masks.keep(visible(seed))):
            result = attention_varlen(*operands, ends(queries), ends(KEYS), mask)
            with clearhead.use_kernel("reference"):
                expected = attention_varlen(*(x.double() for x in operands), ends(queries), ends(KEYS), mask)
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    boundaries = ends(QUERIES).int()
    before = attention_varlen(*operands, boundaries, ends(KEYS))
    boundaries[1] = 1
    assert not torch.equal(attention_varlen(*operands, boundaries, ends(KEYS)), before)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_second_derivatives_in_float32(dropout_p: float) -> None:
    """Those in float64 are compared with finite differences in test_derivatives.py."""
    gradients: list[tuple[Tensor, ...]] = []
    for dtype in (torch.float64, torch.float32):
        leaves = packed(dtype)
        torch.manual_seed(3)
        output = attention_varlen(*leaves, ends(QUERIES), ends(KEYS), masks.causal(), dropout_p=dropout_p)
        plain = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([gradient.square().sum() for gradient in first]).sum(), leaves)
        gradients.append(tuple(gradient.detach() for gradient in (*plain, *first, *second)))
    for exact, found in zip(*gradients, strict=True):
        assert (exact - found.double()).abs().max() <= 1e-5 * max(1.0, float(exact.abs().max()))
    torch.testing.assert_close(gradients[1][3:6], gradients[1][:3], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    operands, bounds = packed(torch.float32), (ends(QUERIES), ends(KEYS))
    half = attention_varlen(*(x.to(dtype) for x in operands), *bounds)
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), attention_varlen(*operands, *bounds), rtol=3e-2, atol=3e-2)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(attention_varlen(*operands, *bounds), half)


def test_cu_seqlens_of_any_stride_are_read_once() -> None:
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


# `attention_varlen` of documents of any lengths, and what it refuses.


RULES: dict[str, Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(2, 1),
    "both": masks.causal() & masks.sliding_window(3, 0),
    "prefix": masks.causal() | masks.prefix(2),
    "bias": masks.bias(torch.randn(1, H, 1, 1, generator=torch.Generator().manual_seed(2)).double()),
}


@pytest.mark.parametrize("rule", RULES)
@given(sizes=st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, 11, 17])] * 2), min_size=1, max_size=6))
def test_documents_of_any_lengths(rule: str, sizes: list[tuple[int, int]]) -> None:
    """Outputs, log-sum-exps and gradients; queries and keys of other lengths, none at all."""
    queries, keys = ([pair[side] for pair in sizes] for side in (0, 1))
    shapes = (sum(queries), H, D), (sum(keys), KV, D), (sum(keys), KV, DV)
    query, key, value = (drawn(*shape).requires_grad_() for shape in shapes)
    mask, more = RULES[rule], {"softcap": 3.0, "sinks": torch.linspace(-1, 1, H).double()}
    result = attention_varlen(query, key, value, ends(queries), ends(keys), mask, return_lse=True, **more)
    expected = one_by_one((query, key, value), queries, keys, lambda *_: mask, **more)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    towards = torch.randn_like(result[0])
    gradients = [torch.autograd.grad(x[0], (query, key, value), towards) for x in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def test_work_grows_with_the_documents_and_not_with_their_product() -> None:
    """32 documents of 128 tokens: a kernel that looked at all pairs would hold 32 times as many scores."""
    query = torch.randn(4096, 2, 8)
    bounds = torch.arange(0, 4097, 128)
    seen: list[int] = []
    original = torch.baddbmm

    def counting(*args: Any, **options: Any) -> Tensor:
        result = original(*args, **options)
        seen.append(result.numel())
        return result

    with pytest.MonkeyPatch.context() as patch, clearhead.use_kernel("chunked"):
        patch.setattr(torch, "baddbmm", counting)
        attention_varlen(query, query, query, bounds, bounds)
    scores = sum(seen)
    assert 2 * 4096 * 128 <= scores < 2 * 4096 * 128 * 8


class Packed(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attention_varlen(x, x, x, ends([3, 4]), ends([3, 4]))


def test_it_is_recorded() -> None:
    x, model = drawn(7, 2, D), Packed()
    with clearhead.record(model, statistics=("head_average",)) as rec:
        model(x)
    weights = rec[""].head_average[0]  # (T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(7).double())
    assert (weights[:3, 3:] == 0).all()
    assert (weights[3:, :3] == 0).all()


def starts(queries: list[int] | None = None, keys: list[int] | None = None) -> dict[str, Tensor]:
    inputs = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
    return {name: torch.tensor(item) for name, item in inputs.items() if item is not None}


SAME = torch.tensor([0, 3, 3, 7])
SHARED = {"cu_seqlens_q": SAME, "cu_seqlens_k": SAME, "key": torch.zeros(7, KV, D), "value": torch.zeros(7, KV, DV)}
BAD: dict[str, tuple[dict[str, Any], type[ClearheadError], str]] = {
    "decreasing": (starts([0, 4, 3, 7]), ArgumentError, "cu_seqlens_q: .*do not decrease, got 4, 3"),
    "lengths": (starts([3, 4, 0, 0]), ArgumentError, "boundaries from 0 on, got a first one of 3"),
    "short": (starts([0, 3, 3, 6]), ArgumentError, "a last boundary of 7: .*query tokens, got 6"),
    "long": (starts(keys=[0, 3, 3, 9]), ArgumentError, "cu_seqlens_k: .*last boundary of 8: .*key tokens, got 9"),
    "documents": (starts(keys=[0, 8]), ArgumentError, "as many sequences as cu_seqlens_q has, 3, got 1"),
    "floats": ({"cu_seqlens_q": torch.tensor([0.0, 7.0])}, DTypeError, "an int32 or int64 tensor"),
    "list": ({"cu_seqlens_q": [0, 7]}, DTypeError, "got list"),
    "two dimensions": ({"cu_seqlens_q": torch.zeros(2, 2).long()}, ShapeError, r"\(n \+ 1,\) for n seq.* got \(2, 2\)"),
    "empty": ({"cu_seqlens_q": torch.zeros(0).long()}, ShapeError, r"got \(0,\)"),
    "device": ({"cu_seqlens_q": torch.zeros(4, device="meta").long()}, DeviceError, "cu_seqlens_q: .*cpu, got meta"),
    "a batch": ({"query": torch.zeros(1, 7, H, D)}, ShapeError, r"query: expected \(T, H, D\), got \(1, 7, 6, 5\)"),
    "sinks of queries": ({"sinks": torch.zeros(1, H, 7)}, ShapeError, r"sinks: expected \(H,\) for packed sequences"),
    "tree": ({"mask": masks.tree(torch.tensor([-1, 0]))}, ArgumentError, "mask: expected a mask of each seq.* tree"),
    "corner": ({"mask": masks.causal("bottom_right")}, ArgumentError, r"mask: expected causal\(\), got causal"),
    "longest": (
        SHARED | {"max_seqlen_k": 3},
        ArgumentError,
        "max_seqlen_k: .* than it, got 3, and a sequence of 4",
    ),
    "size of a mask": ({"mask": masks.lengths(torch.tensor([3, 4, 1]))}, ShapeError, "lengths"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit(case: str) -> None:
    inputs, kind, text = BAD[case]
    bounds = torch.tensor([0, 3, 3, 7])
    arguments: dict[str, Any] = {
        "query": torch.zeros(7, H, D),
        "key": torch.zeros(8, KV, D),
        "value": torch.zeros(8, KV, DV),
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": torch.tensor([0, 3, 3, 8]),
        **inputs,
    }
    with pytest.raises(kind, match=text):
        attention_varlen(**arguments)


def test_one_graph_takes_other_boundaries() -> None:
    def attend(x: Tensor, bounds: Tensor) -> Tensor:
        return clearhead.attention_varlen(x, x, x, bounds, bounds, masks.causal())

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for bounds in ([0, 3, 9], [0, 2, 2, 12]):
        x = torch.randn(bounds[-1], 2, 8, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        got, expected = compiled(x, torch.tensor(bounds)), attend(same, torch.tensor(bounds))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        got.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, same.grad, rtol=1e-5, atol=1e-5)
