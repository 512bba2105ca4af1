"""`torch.nn.attention.varlen` on the CPU, against one call for each sequence in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import clearhead
from clearhead.errors import ArgumentError, DTypeError, ShapeError

EQUAL, OTHER = ([0, 3, 10, 23], [0, 3, 10, 23]), ([0, 3, 10, 23], [0, 5, 5, 31])
SHIFTED = ([0, 3, 10, 23], [0, 4, 9, 23])  # as many queries as keys, in other sequences
WINDOWS = [(-1, -1), (-1, 0), (4, 0), (3, 2)]


def expected(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[list[int], list[int]], window: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The output (T, H, D) and the log-sum-exp (H, T) in float64; the last query is at the last key."""
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for (start, stop), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        q, k, v = (x.double().transpose(0, 1) for x in (query[start:stop], key[first:last], value[first:last]))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        distance = torch.arange(last - first) - torch.arange(stop - start)[:, None] - (last - first) + (stop - start)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            visible &= distance >= -window[0]
        if window[1] >= 0:
            visible &= distance <= window[1]
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
        sums.append(scores.logsumexp(-1))
        outputs.append((scores.softmax(-1).nan_to_num(0) @ v).transpose(0, 1))
    return torch.cat(outputs), torch.cat(sums, 1)


def tensors(bounds: tuple[list[int], list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (bounds[0][-1], 6, 8), (bounds[1][-1], 2, 8), (bounds[1][-1], 2, 8)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def int32(bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("bounds", [EQUAL, OTHER, SHIFTED])
def test_outputs_and_gradients(
    bounds: tuple[list[int], list[int]], window: tuple[int, int], dtype: torch.dtype, active: None
) -> None:
    inputs = tensors(bounds, dtype)
    ends = int32(bounds[0]), int32(bounds[1])
    options = {"window_size": window, "enable_gqa": True}
    output, lse = varlen_attn(*inputs, *ends, 13, 26, return_aux=AuxRequest(lse=True), **options)
    right, right_lse = expected(*inputs, bounds, window)
    precise = [x.detach().double().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(output.double().sin().sum(), inputs)
    right_gradients = torch.autograd.grad(expected(*precise, bounds, window)[0].sin().sum(), precise)
    allowed = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    for found, exact in zip((output, *gradients), (right, *right_gradients), strict=True):
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() <= allowed * exact.abs().max()
    assert lse.shape == (6, 23)
    assert torch.equal(lse.isinf(), right_lse.isinf())
    assert (lse - right_lse).masked_fill(right_lse.isinf(), 0).abs().max() <= allowed
    written = torch.empty_like(output)
    varlen_attn_out(written, *(x.detach() for x in inputs), *ends, 13, 26, **options)
    assert torch.equal(written, output)


def test_the_used_part_of_each_sequence(active: None) -> None:
    bounds, used = ([0, 1, 3], [0, 7, 18]), [4, 11]
    query, key, value = (x.detach() for x in tensors(bounds))
    ends = int32(bounds[0]), int32(bounds[1])
    output = varlen_attn(query, key, value, *ends, 2, 11, enable_gqa=True, seqused_k=int32(used))
    parts = [torch.cat([x[:4], x[7:18]]) for x in (key, value)]
    right, _ = expected(query, *parts, ([0, 1, 3], [0, 4, 15]), (-1, -1))
    assert (output - right).abs().max() <= 1e-5


@pytest.mark.parametrize("window", WINDOWS)
def test_paged_keys_and_values(window: tuple[int, int], active: None) -> None:
    generator = torch.Generator().manual_seed(9)
    query = torch.randn(3, 6, 8, generator=generator)
    pages = torch.randn(2, 9, 4, 2, 8, generator=generator)  # keys and values, 9 pages of 4 tokens
    table, used = int32([[3, 1, 7], [0, 2, 8]]), [6, 11]  # type: ignore[list-item]
    options = {"window_size": window, "enable_gqa": True, "seqused_k": int32(used), "block_table": table}
    output = varlen_attn(query, *pages, int32([0, 1, 3]), None, 2, 12, **options)
    parts = [torch.cat([x[row.long()].flatten(0, 1)[:n] for row, n in zip(table, used, strict=True)]) for x in pages]
    right, _ = expected(query, *parts, ([0, 1, 3], [0, 6, 17]), window)
    assert (output - right).abs().max() <= 1e-5


def test_compiled(active: None) -> None:
    inputs, ends = tensors(EQUAL), int32(EQUAL[0])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attn(query, key, value, ends, ends, 13, 13, window_size=(-1, 0), enable_gqa=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for found, right in zip(
        torch.autograd.grad(compiled(*inputs).sin().sum(), inputs),
        torch.autograd.grad(attend(*inputs).sin().sum(), inputs),
        strict=True,
    ):
        assert torch.equal(found, right)


def test_without_activation_it_is_pytorchs_error() -> None:
    query, key, value = (x.detach() for x in tensors(EQUAL))
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(query, key, value, int32(EQUAL[0]), int32(EQUAL[1]), 13, 13, enable_gqa=True)


def test_refusals(active: None) -> None:
    query, key, value = (x.detach() for x in tensors(EQUAL))
    ends, options = int32(EQUAL[0]), {"enable_gqa": True}
    with pytest.raises(DTypeError, match=r"query: expected one of torch.float32, .* got torch.float64"):
        varlen_attn(query.double(), key.double(), value.double(), ends, ends, 13, 13, **options)
    with pytest.raises(ArgumentError, match="cu_seqlens_q: expected"):
        varlen_attn(query, key, value, int32([0, 3, 24]), int32([0, 3, 23]), 13, 13, **options)
    with pytest.raises(ArgumentError, match=r"seqused_k: expected a number of keys for each of 3 .* got \[3, 9, 13\]"):
        varlen_attn(query, key, value, ends, ends, 13, 13, seqused_k=int32([3, 9, 13]), **options)
    with pytest.raises(ArgumentError, match=r"seqused_k: expected the number of keys of each sequence, .* got None"):
        varlen_attn(query, key[None], value[None], ends, None, 13, 13, block_table=int32([0]), **options)
    with pytest.raises(RuntimeError, match="inference-only"):
        varlen_attn(*tensors(EQUAL), ends, ends, 13, 13, seqused_k=int32([3, 7, 13]), **options)


def test_packed_layout_of_clearhead(active: None) -> None:
    query, key, value = (x.detach() for x in tensors(EQUAL))
    ends = torch.tensor(EQUAL[0])
    ours = clearhead.attention_varlen(query, key, value, ends, ends, clearhead.masks.causal())
    theirs = varlen_attn(query, key, value, ends.int(), ends.int(), 13, 13, window_size=(-1, 0), enable_gqa=True)
    assert (ours - theirs).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hook", [torch.Tensor.double, torch.Tensor.half])
def test_saved_tensors_in_another_precision(hook: Callable[[Tensor], Tensor], dtype: torch.dtype, active: None) -> None:
    inputs, ends = tensors(EQUAL, dtype), int32(EQUAL[0])

    def gradients() -> tuple[Tensor, ...]:
        output = varlen_attn(*inputs, ends, ends, 13, 13, enable_gqa=True)
        return torch.autograd.grad(output.double().sin().sum(), inputs)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: hook(x) if x.is_floating_point() else x):
        found = gradients()
    for gradient, right in zip(found, expected, strict=True):
        allowed = 5e-3 if dtype is torch.float32 else 1e-2
        assert (gradient - right).abs().max() <= allowed * right.abs().max()


def test_a_saved_tensor_of_another_shape_is_refused(active: None) -> None:
    inputs, ends = tensors(EQUAL), int32(EQUAL[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[:, :1] if x.shape == (23, 6, 8) else x):
        output = varlen_attn(*inputs, ends, ends, 13, 13, enable_gqa=True)
    with pytest.raises(ShapeError, match="saved query: expected the shape"):
        output.sum().backward()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("bounds", [EQUAL, OTHER])
def test_results_are_laid_out_as_the_operands(
    bounds: tuple[list[int], list[int]], window: tuple[int, int], active: None
) -> None:
    """As PyTorch's fake kernels say, so that graphs of its compiler can rely on it."""
    inputs = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in tensors(bounds)]
    ends = int32(bounds[0]), int32(bounds[1])
    longest = [max(b - a for a, b in itertools.pairwise(each)) for each in bounds]

    def step(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        output = varlen_attn(query, key, value, *ends, *longest, window_size=window, enable_gqa=True)
        assert isinstance(output, Tensor)
        return [output, *torch.autograd.grad(output.sin().sum(), (query, key, value))]

    for x, result in zip((inputs[0], *inputs), step(*inputs), strict=True):
        assert result.stride() == x.stride()
    attend = torch.compile(lambda *x: varlen_attn(*x, *ends, *longest, window_size=window, enable_gqa=True))
    output = attend(*inputs)
    found = [output, *torch.autograd.grad(output.sin().sum(), inputs)]
    assert all(torch.equal(*pair) for pair in zip(found, step(*inputs), strict=True))


def test_pages_that_do_not_exist_are_refused(active: None) -> None:
    query, pages = torch.randn(2, 4, 8), torch.randn(3, 5, 4, 8)
    for page in (-1, 3):
        table, used = torch.tensor([[0, page]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
        with pytest.raises(ArgumentError, match="block_table: expected numbers of pages that exist"):
            varlen_attn(query, pages, pages, int32([0, 2]), None, 2, 7, seqused_k=used, block_table=table)
        used = torch.tensor([5], dtype=torch.int32)  # the second page is not in use
        assert varlen_attn(query, pages, pages, int32([0, 2]), None, 2, 5, seqused_k=used, block_table=table).shape
