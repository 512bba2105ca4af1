"""`torch.nn.functional`'s attention, on Clearhead's core."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attention
from ..errors import explain_problem, shape_text
from ..masks import bias, causal, keep
from ..masks.base import Mask
from .errors import DTypeRuntimeError, ShapeRuntimeError

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with Clearhead's meaning and kernels.

    It differs in that a query with every key hidden gives zero on every kernel, NaN in hidden keys and values does
    not spread, and `is_causal` together with `attn_mask` means both (PyTorch refuses that).

    Args:
        query: (…, H, L, D); leading sizes broadcast.
        key: (…, H, S, D), or (…, Hkv, S, D) with `enable_gqa`.
        value: (…, H, S, Dv), or (…, Hkv, S, Dv) with `enable_gqa`.
        attn_mask: broadcasts to (…, H, L, S); bool ``True`` = may attend, or float, added to the scores.
        dropout_p: probability that a weight is dropped, whatever the mode. Default 0.
        is_causal: query i sees keys j ≤ i only. Default False.
        scale: factor of the scores. Default 1/√D.
        enable_gqa: let several query heads share a key/value head. Default False.

    Returns:
        (…, H, L, Dv).

    Raises:
        ShapeError, DTypeError: which are also `RuntimeError`s, as PyTorch's are.

    Example:
        >>> import torch, clearhead
        >>> q, k, v = torch.randn(3, 2, 5, 8).unbind(0)
        >>> clearhead.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 5, 8])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ShapeRuntimeError(
                explain_problem(name, expected="at least (length, features)", got=shape_text(tensor.shape))
            )
    heads = query.shape[-3] if query.dim() > 2 else 1
    kv_heads = key.shape[-3] if key.dim() > 2 else 1
    if kv_heads != heads and not enable_gqa and 1 not in (heads, kv_heads):
        raise ShapeRuntimeError(
            explain_problem(
                "key",
                expected=f"H = {heads} heads as in query",
                got=shape_text(key.shape),
                fix="Pass enable_gqa=True if query heads share keys.",
            )
        )
    leading = _broadcast(query, key, value)
    if not enable_gqa:
        heads = kv_heads = max(heads, kv_heads)
    q = _four_dimensional(query, leading, heads)
    k, v = _four_dimensional(key, leading, kv_heads), _four_dimensional(value, leading, kv_heads)
    mask = _mask(attn_mask, leading, heads, is_causal)
    output = attention(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    shape = (*leading, *((heads,) if _has_heads(query, key, value) else ()), *output.shape[-2:])
    return output.reshape(shape)


def _has_heads(*tensors: Tensor) -> bool:
    return max(tensor.dim() for tensor in tensors) > 2


def _broadcast(*tensors: Tensor) -> tuple[int, ...]:
    """The sizes before (H, L, D), broadcast together."""
    try:
        return tuple(torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors)))
    except RuntimeError as error:
        got = ", ".join(shape_text(tensor.shape) for tensor in tensors)
        raise ShapeRuntimeError(
            explain_problem("query, key, value", expected="leading sizes that broadcast", got=got)
        ) from error


def _four_dimensional(tensor: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    """(…, H, L, D) → (B, H, L, D), B the product of the leading sizes."""
    return tensor.expand(*leading, heads, *tensor.shape[-2:]).reshape(-1, heads, *tensor.shape[-2:])


def _mask(attn_mask: Tensor | None, leading: tuple[int, ...], heads: int, is_causal: bool) -> Mask | None:
    rule = causal() if is_causal else None
    if attn_mask is None:
        return rule
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise DTypeRuntimeError(
            explain_problem("attn_mask", expected="bool (True = may attend) or float", got=str(attn_mask.dtype))
        )
    if attn_mask.dim() > 3 and len(leading) != 1:
        attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    while attn_mask.dim() < 4:
        attn_mask = attn_mask.unsqueeze(0)
    given = bias(attn_mask) if attn_mask.is_floating_point() else keep(attn_mask)
    return given if rule is None else rule & given
