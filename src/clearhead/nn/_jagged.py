"""`scaled_dot_product_attention` of jagged nested tensors, which are packed sequences."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._checks import flag
from .._torch_private import ragged_dimension
from .._varlen import attention_varlen
from ..errors import ArgumentError, ShapeError
from ..masks import causal


def jagged_attention(
    inputs: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention within each sequence of jagged (B, H, lengths, D) tensors. The result is jagged like the query.

    Raises:
        ShapeError: if an input is not jagged, has holes, or lacks the heads before the lengths.
        ArgumentError: for a mask, which would need rows and columns of sequences of different lengths.
    """
    if attn_mask is not None:
        fix = "Pad them with torch.nested.to_padded_tensor, or use clearhead.attention_varlen, which takes masks."
        raise ArgumentError("attn_mask", expected="None with jagged tensors", got=type(attn_mask).__name__, fix=fix)
    for name, tensor in zip(("query", "key", "value"), inputs, strict=True):
        _require_heads_first(name, tensor)
    query, key, value = inputs
    if query.shape[0] != key.shape[0] or query.shape[0] != value.shape[0]:
        got = ", ".join(str(tensor.shape[0]) for tensor in inputs)
        raise ShapeError("query, key, value", expected="equal numbers of sequences", got=got)
    heads, enable_gqa = (query.shape[1], key.shape[1], value.shape[1]), flag("enable_gqa", enable_gqa)
    if heads[1] != heads[2] or (heads[0] != heads[1] and not enable_gqa):
        fix = "" if enable_gqa else "Pass enable_gqa=True if query heads share keys."
        expected, got = "equal numbers of heads", ", ".join(map(str, heads))
        raise ShapeError("query, key, value", expected=expected, got=got, fix=fix)
    packed = [cast(Any, tensor.transpose(1, 2)) for tensor in inputs]  # (B, lengths, H, D)
    q, k, v = (tensor.values() for tensor in packed)  # (T, H, D)
    if k.shape[0] != v.shape[0]:
        raise ShapeError("value", expected="the key's lengths", got="others", fix="Each key needs its value.")
    offsets = packed[0].offsets()
    mask = causal() if flag("is_causal", is_causal) else None
    output = attention_varlen(q, k, v, offsets, packed[1].offsets(), mask, scale=scale, dropout_p=dropout_p)
    return torch.nested.nested_tensor_from_jagged(output, offsets).transpose(1, 2)  # (B, H, lengths, Dv)


def _require_heads_first(name: str, tensor: object) -> None:
    expected = "a jagged tensor (B, H, lengths, D) without holes, like query, key and value all"
    if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout is not torch.jagged:
        got = f"a tensor of layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        fix = "Make it with torch.nested.nested_tensor(..., layout=torch.jagged), or pad all of them."
        raise ShapeError(name, expected=expected, got=got, fix=fix)
    if tensor.dim() != 4 or ragged_dimension(tensor) != 2:
        fix = "Split the features into (B, lengths, H, D) with .unflatten(-1, (H, D)), then take .transpose(1, 2)."
        raise ShapeError(name, expected=expected, got="a jagged tensor of another shape", fix=fix)
