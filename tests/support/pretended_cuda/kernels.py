"""PyTorch's fused attention on the pretended device: their results and gradients, computed on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.attention.varlen  # pyright: ignore[reportUnusedImport]  # it defines the operators
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """The scores of every row, (B, H, L, S), in float32; grouped heads repeated."""
    if bias is not None and bias.dtype != query.dtype:
        raise RuntimeError(f"invalid dtype for bias: {bias.dtype}, and the query has {query.dtype}")
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.float() @ key.float().transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if bias is not None:
        scores = scores + bias.float()
    return scores


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, bias, is_causal, scale)
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    mixed = weights @ value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
    # The fused kernels lay heads out side by side.
    output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
    return output.copy_(mixed), lse


def _gradients(
    gradient: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
    bias_wanted: bool = False,
    of_lse: Tensor | None = None,
    results: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor | None]:
    """Gradients of query, key, value and, where it is wanted, of the bias: dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O) + dlse).

    P and rowsum(dO ∘ O) come from `results`, output and log-sum-exp, if they are given, as in a fused kernel. In half
    precision the sum comes from P: how PyTorch's kernels round is not tested.
    """
    if gradient is None:  # as PyTorch's kernels return nothing where another node has computed all gradients
        return [None] * 3
    group = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _scores(query, key, bias, is_causal, scale)
    weights = scores.softmax(-1) if results is None else (scores - results[1][..., None]).exp()
    all_keys, all_values = (x.float().repeat_interleave(group, 1) for x in (key, value))
    gradient = gradient.float()
    of_weights = gradient @ all_values.transpose(-2, -1)
    products = weights * of_weights
    if results is not None and query.dtype == torch.float32:
        products = gradient * results[0]
    of_rows = products.sum(-1, keepdim=True)
    of_scores = weights * (of_weights - (of_rows if of_lse is None else of_rows - of_lse[..., None]))
    of_query = factor * of_scores @ all_keys
    of_key = factor * of_scores.transpose(-2, -1) @ query.float()
    of_value = weights.transpose(-2, -1) @ gradient
    # The sum over the query heads of a group.
    of_key, of_value = (x.unflatten(1, (-1, group)).sum(2) for x in (of_key, of_value))
    of_inputs: list[Tensor | None] = [of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)]
    return (
        [*of_inputs, of_scores.sum_to_size(bias.shape).to(bias.dtype)]
        if bias is not None and bias_wanted
        else of_inputs
    )


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Flash attention for variable lengths: (T, H, D), lse (H, T). It refuses what the real one refuses."""
    _require_flash(query, key, value, cu_seq_q, cu_seq_k)
    output, lse = (
        torch.zeros_like(query),
        query.new_full((query.shape[1], query.shape[0]), torch.inf, dtype=torch.float),
    )
    for queries, keys in _slices(cu_seq_q, cu_seq_k, max_q, max_k):
        if keys.start < keys.stop:
            parts = (_heads(query, queries), _heads(key, keys), _heads(value, keys))
            bias = _bias_of_window(queries.stop - queries.start, keys.stop - keys.start, window_size, query.dtype)
            found, found_lse = _attend(*parts, bias, False, scale)
            output[queries], lse[:, queries] = found[0].transpose(0, 1), found_lse[0]
    return output, lse, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, ...]:
    _require_flash(query, key, value, cu_seq_q, cu_seq_k)
    results = tuple(map(torch.zeros_like, (query, key, value)))
    for queries, keys in _slices(cu_seq_q, cu_seq_k, max_q, max_k):
        if keys.start < keys.stop:
            parts = (_heads(gradient, queries), _heads(query, queries), _heads(key, keys), _heads(value, keys))
            bias = _bias_of_window(queries.stop - queries.start, keys.stop - keys.start, window_size, query.dtype)
            found = _gradients(*parts, bias, False, scale)
            for result, each, rows in zip(results, found, (queries, keys, keys), strict=True):
                result[rows] = cast(Tensor, each)[0].transpose(0, 1)
    return results


def _require_flash(query: Tensor, key: Tensor, value: Tensor, *bounds: Tensor) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16) or not query.dtype == key.dtype == value.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(each.dtype != torch.int32 or not each.is_contiguous() for each in bounds):
        raise RuntimeError("cu_seqlens must have dtype int32 and be contiguous")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or value.shape[-1] != query.shape[-1]:
        raise RuntimeError("head_size should be a multiple of 8, at most 256")


def _slices(cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    for (start, stop), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        # Rows beyond the longest get no thread block.
        yield slice(start, min(stop, start + max_q)), slice(first, min(last, first + max_k))


def _heads(x: Tensor, rows: slice) -> Tensor:
    """(T, H, D) → (1, H, l, D)."""
    return x[rows].transpose(0, 1)[None]


def _bias_of_window(length: int, keys: int, window: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Aligned at the last query and the last key, as FlashAttention aligns it."""
    distance = torch.arange(keys) - torch.arange(length)[:, None] - (keys - length)
    visible = torch.ones(length, keys, dtype=torch.bool)
    if window[0] >= 0:
        visible &= distance >= -window[0]
    if window[1] >= 0:
        visible &= distance <= window[1]
    return torch.zeros(length, keys, dtype=dtype).masked_fill(~visible, float("-inf"))[None, None]


def flex(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, by_keys: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """FlexAttention, of the cells that its block mask shows, and its log-sum-exp. Rows without a key are zero."""
    output, lse = _attend(query, key, value, _bias_of_cells(visible, query.dtype), False, scale)
    return output.nan_to_num(nan=0.0), lse


def flex_backward(
    gradient: Tensor,
    lse_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    by_keys: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """The gradient of the query from the blocks of each row, the others from the blocks of each column."""
    found: list[list[Tensor | None]] = []
    for cells in (visible, by_keys):
        # In the stand-in a row without a key sees every key, and gets no gradient.
        empty = ~cells.any(-1, keepdim=True)
        bias = _bias_of_cells(cells | empty, query.dtype)
        of_lse = lse_gradient.masked_fill(empty[..., 0], 0)
        found.append(_gradients(gradient.masked_fill(empty, 0), query, key, value, bias, False, scale, of_lse=of_lse))
    return tuple(cast("list[Tensor]", [found[0][0], *found[1][1:3]]))


def _bias_of_cells(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))


_library = torch.library.Library("pretended_cuda", "DEF")
_operands = "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor by_keys, float scale"
_library.define(f"flex_attention({_operands}) -> (Tensor, Tensor)")
_library.define(f"flex_backward(Tensor gradient, Tensor lse_gradient, {_operands}) -> (Tensor, Tensor, Tensor)")


def _counter() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, lse = _attend(query, key, value, None, is_causal, scale)
    none = torch.empty(0)
    return output, lse, none, none, query.shape[2], key.shape[2], _counter(), _counter(), none


def flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None = None
) -> tuple[Any, ...]:
    *_, is_causal, _, _ = others
    return tuple(_gradients(gradient, query, key, value, None, is_causal, scale, results=others[:2]))


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, lse = _attend(query, key, value, bias, is_causal, scale)
    # Filled up to a multiple of 32 rows, as PyTorch's kernel has it.
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf) if compute_log_sumexp else lse[:, :, :0]
    return output, lse, _counter(), _counter()


def efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if lse.shape[2] % 32:
        raise RuntimeError(f"expected a log-sum-exp of a multiple of 32 rows, got {tuple(lse.shape)}")
    results = output, lse[..., : query.shape[2]]
    of_inputs = _gradients(gradient, query, key, value, bias, is_causal, scale, wanted[3], results=results)
    return *of_inputs, *([None] if len(of_inputs) == 3 else [])


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, lse = _attend(query, key, value, bias, is_causal, scale)
    none = torch.empty(0)
    return output, lse[..., None], none, none, query.shape[2], key.shape[2], _counter(), _counter(), none


def cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None = None
) -> tuple[Any, ...]:
    output, lse, _, _, bias, *_, is_causal = others
    return tuple(_gradients(gradient, query, key, value, bias, is_causal, scale, results=(output, lse.squeeze(3))))


#: What runs in place of each operator. A fused kernel counts as one.
FUSED: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    torch.ops.pretended_cuda.flex_attention.default: flex,
    torch.ops.pretended_cuda.flex_backward.default: flex_backward,
    torch.ops.torch_attn._varlen_attn.default: varlen,
    torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward,
}
BACKENDS: dict[Callable[..., Any], str] = {
    flex: "flex",
    varlen: "flash, variable lengths",
    flash: "flash",
    efficient: "efficient",
    cudnn: "cuDNN",
}
