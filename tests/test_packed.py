"""`attention_varlen`: each document as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import attention_varlen, masks
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, ShapeError
from clearhead.masks import Mask

from .test_rows import DV, KV, D, H, ends, one_by_one

RULES: dict[str, Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(2, 1),
    "both": masks.causal() & masks.sliding_window(3, 0),
    "prefix": masks.causal() | masks.prefix(2),
    "bias": masks.bias(torch.randn(1, H, 1, 1, generator=torch.Generator().manual_seed(2)).double()),
}


def tokens(count: int, heads: int, dim: int) -> Tensor:
    return torch.randn(count, heads, dim, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rule", RULES)
@given(sizes=st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, 11, 17])] * 2), min_size=1, max_size=6))
def test_documents_of_any_lengths(rule: str, sizes: list[tuple[int, int]]) -> None:
    """Outputs, log-sum-exps and gradients; queries and keys of other lengths, none at all."""
    queries, keys = ([pair[side] for pair in sizes] for side in (0, 1))
    query, key, value = tokens(sum(queries), H, D), tokens(sum(keys), KV, D), tokens(sum(keys), KV, DV)
    mask, more = RULES[rule], {"softcap": 3.0, "sinks": torch.linspace(-1, 1, H).double()}
    result = attention_varlen(query, key, value, ends(queries), ends(keys), mask, return_lse=True, **more)
    expected = one_by_one((query, key, value), queries, keys, lambda *_: mask, **more)
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    towards = torch.randn_like(result[0])
    gradients = [torch.autograd.grad(x[0], (query, key, value), towards) for x in (result, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


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
    x, model = tokens(7, 2, D).detach(), Packed()
    with clearhead.record(model, statistics=("head_average",)) as rec:
        model(x)
    weights = rec[""].head_average[0]  # (T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(7).double())
    assert (weights[:3, 3:] == 0).all()
    assert (weights[3:, :3] == 0).all()


def starts(queries: list[int] | None = None, keys: list[int] | None = None) -> dict[str, Tensor]:
    inputs = {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
    return {name: torch.tensor(item) for name, item in inputs.items() if item is not None}


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
    "corner": ({"mask": masks.causal("bottom_right")}, ArgumentError, r"mask: expected causal\(\), got causal"),
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
