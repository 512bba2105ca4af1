"""`attention_weights`: the exact weights of chosen queries, built in blocks, never (B, H, L, S) unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .attention import autocast_off, cast_for_autocast, run_call
from .call import AttentionCall, build_call
from .errors import ArgumentError, DTypeError, explain_problem
from .kernels.blocks import block_scores, block_weights, grouped, grouped_transposed, score_blocks
from .kernels.dispatch import forced_kernel
from .kernels.native_statistics import native_output_and_weights, native_weights
from .kernels.reference import reference_weights
from .kernels.second_order import gradients_of
from .masks.base import Mask
from .observe import watched
from .tracing import is_tracing, is_transformed

__all__ = ["Queries", "attention_weights", "attention_with_weights", "compute_weights", "row_numbers"]

Queries = int | slice | Sequence[int] | Tensor


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    queries: Queries | None = None,
    average_attn_weights: bool = False,
) -> Tensor:
    """The weights p that `attention` mixes the values with, before dropout, for all queries or chosen ones.

    ::

        p_ij = exp(s_ij − lse_i),  zero where masked;  a query that sees no key has p_i = 0

    Rows are computed from query and key in blocks, so an average over heads never holds (B, H, L, S). Gradients
    flow into query, key, sinks and biases.

    Args:
        query: (B, H, L, D), or (H, L, D) without a batch.
        key: (B, Hkv, S, D).
        mask, scale, softcap, sinks, query_positions, key_positions: as for `attention`.
        queries: which rows: an index, a slice, a list of indices or an integer or bool tensor (L,). Default all.
        average_attn_weights: average over the heads. Default False.

    Returns:
        (B, H, n, S), or (B, n, S) averaged, n the number of queries chosen (1 for an int); float32, float64 for
        float64 inputs. Without a batch, without B.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError, MaskTypeError: as `attention`; also for indices out of
            range.

    Example:
        >>> import torch, clearhead
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
        >>> clearhead.attention_weights(query, key, queries=[0, 3], average_attn_weights=True).shape
        torch.Size([2, 2, 7])
    """
    query, key = cast_for_autocast(query, key)
    with autocast_off(query):
        call = build_call(
            query,
            key,
            None,
            mask,
            scale=scale,
            dropout_p=0.0,
            softcap=softcap,
            sinks=sinks,
            query_positions=query_positions,
            key_positions=key_positions,
            return_lse=False,
        )
        weights = compute_weights(call, row_numbers(queries, call.grid.query_length), average_attn_weights)
    return weights.squeeze(0) if query.dim() == 3 else weights


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    average_attn_weights: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention` and `attention_weights` of one call, which is validated once.

    Where neither gradients nor dropout are wanted, the native kernel computes both in one pass; the output is then
    that of `attention` to rounding.

    Args:
        query, key, value, mask, scale, dropout_p, softcap, sinks, query_positions, key_positions: as for `attention`,
            with a batch.
        average_attn_weights: as for `attention_weights`.

    Returns:
        Output (B, H, L, Dv), and weights (B, H, L, S), or (B, L, S) averaged.

    Raises:
        The errors of `attention`.

    Example:
        >>> import torch
        >>> from clearhead.weights import attention_with_weights
        >>> x = torch.randn(2, 4, 5, 8)
        >>> output, weights = attention_with_weights(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 4, 5, 8]), torch.Size([2, 4, 5, 5]))
    """
    query, key, value = cast_for_autocast(query, key, value)
    with autocast_off(query):
        call = build_call(
            query,
            key,
            value,
            mask,
            scale=scale,
            dropout_p=dropout_p,
            softcap=softcap,
            sinks=sinks,
            query_positions=query_positions,
            key_positions=key_positions,
            return_lse=False,
        )
        both = _in_one_pass(call, average_attn_weights)
        if both is not None:
            return both
        return run_call(call)[0], compute_weights(call, None, average_attn_weights)


def _in_one_pass(call: AttentionCall, average: bool) -> tuple[Tensor, Tensor] | None:
    if call.dropout_p or call.needs_gradients or call.compute_dtype != torch.float32 or forced_kernel() is not None:
        return None
    if watched() or is_tracing() or is_transformed():
        return None
    return native_output_and_weights(call, average)


def compute_weights(call: AttentionCall, rows: Tensor | None, average: bool) -> Tensor:
    """Weights of a validated call; `rows` holds row numbers, ``None`` means all."""
    if is_tracing() or is_transformed():
        return _reference(call, rows, average)
    request = _Request(rows if rows is None else rows.to(call.query.device), average)
    inputs = _inputs(call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast(Tensor, _Weights.apply(call, request, *inputs))
    return _forward(call, request)


@dataclass(frozen=True)
class _Request:
    rows: Tensor | None
    average: bool

    def count(self, call: AttentionCall) -> int:
        return call.grid.query_length if self.rows is None else len(self.rows)


class _Weights(torch.autograd.Function):
    """Recomputes blocks backward: with dp the gradient of p, ds = p (dp − Σ_j p dp)."""

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, request: _Request, *inputs: Tensor) -> Tensor:
        ctx.call = call.without_tensors()
        ctx.request = request
        ctx.save_for_backward(*inputs)
        return _forward(call, request)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, *rest = (tensor.view_as(tensor) for tensor in ctx.saved_tensors)
        call = ctx.call.with_tensors(query, key, key, *rest)
        with torch.autocast(query.device.type, enabled=False):
            if not torch.is_grad_enabled():
                return (None, None, *_backward(call, ctx.request, gradients[0]))
            weights = _reference(call, ctx.request.rows, ctx.request.average)
            return (None, None, *gradients_of([weights], [query, key, *rest], gradients))


def _forward(call: AttentionCall, request: _Request) -> Tensor:
    native = native_weights(call, request.rows, request.average) if call.compute_dtype == torch.float32 else None
    if native is not None:
        return native
    batch, heads, keys = call.grid.batch_size, call.grid.num_heads, call.grid.key_length
    shape = (batch, request.count(call), keys) if request.average else (batch, heads, request.count(call), keys)
    result = call.query.new_zeros(shape, dtype=call.compute_dtype)
    for block, place, query, key in score_blocks(call, request.rows):
        weights, _ = block_weights(call, block, block_scores(call, block, query, key)[0])
        if request.average:
            result[block.batch, place, block.columns] += weights.sum(1) / heads
        else:
            result[block.batch, block.heads, place, block.columns] = weights
    return result


def _backward(call: AttentionCall, request: _Request, gradient: Tensor) -> tuple[Tensor, ...]:
    dtype, heads = call.compute_dtype, call.grid.num_heads
    query_gradient = torch.zeros_like(call.query, dtype=dtype)
    key_gradient = torch.zeros_like(call.key, dtype=dtype)
    sinks_gradient = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=dtype)
    bias_gradients = [torch.zeros_like(tensor, dtype=dtype) for tensor in call.bias_tensors]
    for block, place, query, key in score_blocks(call, request.rows):
        scores, squashed = block_scores(call, block, query, key)
        weights, lse = block_weights(call, block, scores)
        if request.average:
            weights_gradient = gradient[block.batch, None, place, block.columns].to(dtype) / heads
        else:
            weights_gradient = gradient[block.batch, block.heads, place, block.columns].to(dtype)
        mean = (weights * weights_gradient).sum(-1, keepdim=True)
        if call.sinks is not None and sinks_gradient is not None:
            share = (call.sinks[block.heads].to(dtype)[None, :, None, None] - lse).exp()
            sinks_gradient[block.heads] -= (share * mean).sum((0, 2, 3))
        scores_gradient = weights * (weights_gradient - mean)
        if call.mask is not None:
            call.mask.add_bias_gradients(bias_gradients, block, scores_gradient)
        if squashed is not None:
            scores_gradient.mul_(1 - squashed.square())
        scores_gradient.mul_(call.scale)
        target = query_gradient[block.batch, block.heads]
        rows = torch.arange(place.start, place.stop, device=query.device) if request.rows is None else block.rows
        target.index_add_(2, cast(Tensor, rows), grouped(scores_gradient, key))
        kv_heads = slice(block.heads.start // call.group, block.heads.stop // call.group)
        key_gradient[block.batch, kv_heads, block.columns] += grouped_transposed(scores_gradient, query, key.shape[1])
    gradients = [
        query_gradient,
        key_gradient,
        *([] if sinks_gradient is None else [sinks_gradient]),
        *bias_gradients,
    ]
    return tuple(found.to(tensor.dtype) for found, tensor in zip(gradients, _inputs(call), strict=True))


def _reference(call: AttentionCall, rows: Tensor | None, average: bool) -> Tensor:
    weights = reference_weights(call)[0]
    if rows is not None:
        weights = weights.index_select(2, rows.to(weights.device))
    return weights.mean(1) if average else weights


def _inputs(call: AttentionCall) -> tuple[Tensor, ...]:
    sinks = () if call.sinks is None else (call.sinks,)
    return (call.query, call.key, *sinks, *call.bias_tensors)


def row_numbers(queries: Queries | None, length: int) -> Tensor | None:
    """Row numbers 0 … L−1 from whatever the caller indexes with."""
    if queries is None:
        return None
    if isinstance(queries, slice):
        return torch.tensor(range(length)[queries], dtype=torch.int64)
    if isinstance(queries, Tensor) and queries.dtype == torch.bool:
        if tuple(queries.shape) != (length,):
            raise ArgumentError(
                explain_problem("queries", expected=f"a bool tensor ({length},)", got=f"{tuple(queries.shape)}")
            )
        return queries.nonzero().squeeze(-1)
    try:
        rows = torch.as_tensor(queries)
    except (TypeError, ValueError, RuntimeError):
        rows = torch.zeros(1)
    rows = rows.long() if rows.numel() == 0 else rows
    if rows.is_floating_point() or rows.dtype == torch.bool or rows.dim() > 1:
        raise DTypeError(
            explain_problem("queries", expected="an int, a slice or a list of row numbers", got=repr(queries))
        )
    rows = rows.reshape(-1).long()
    if not is_tracing() and rows.numel() and not bool(((rows >= -length) & (rows < length)).all()):
        raise ArgumentError(
            explain_problem("queries", expected=f"row numbers below L = {length}", got=f"{rows.tolist()}")
        )
    return torch.where(rows < 0, rows + length, rows)
