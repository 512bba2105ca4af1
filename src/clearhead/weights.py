"""`attention_weights`: the exact weights of chosen queries, built in blocks, never (B, H, L, S) unless asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import autocast_off, cast_for_autocast, run_call
from .call import build_call
from .errors import ArgumentError, DTypeError, explain_problem
from .masks.base import Mask
from .tracing import is_tracing
from .weights_passes import compute_weights, has_one_pass, in_one_pass

__all__ = ["Queries", "attention_weights", "attention_with_weights", "row_numbers"]

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

    In float32 and without dropout, the native kernel computes both in one pass; the output is then that of `attention`
    to rounding.

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
        if has_one_pass(call):
            return run_call(call, lambda call: in_one_pass(call, average_attn_weights))
        return run_call(call)[0], compute_weights(call, None, average_attn_weights)


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
