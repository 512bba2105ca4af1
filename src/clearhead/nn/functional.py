"""`torch.nn.functional`'s attention, on Clearhead's core."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._attention import attention
from .._checks import flag, strided
from ..errors import ClearheadError, DeviceError, ShapeError, shape_text
from ..masks import bias, causal, keep
from ..masks._base import Mask
from ._convention import require_bool_or_float
from ._errors import also_pytorchs

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
    try:
        leading, (q, k, v), mask = translate(query, key, value, attn_mask, is_causal, enable_gqa)
        output = attention(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    except ClearheadError as error:
        raise also_pytorchs(error) from error.__cause__
    heads = (q.shape[1],) if max(tensor.dim() for tensor in (query, key, value)) > 2 else ()
    return output.reshape(*leading, *heads, *output.shape[-2:])


def translate(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor], Mask | None]:
    """Bring PyTorch's arguments into the core's form.

    Returns:
        The leading sizes, query, key and value as (B, H, L, D), B the product of the leading sizes, and the mask.

    Raises:
        ShapeError, DTypeError: for what does not fit.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if strided(name, tensor).dim() < 2:
            raise ShapeError(name, expected="at least (length, features)", got=shape_text(tensor.shape))
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    leading = _broadcast(query, key, value)
    heads, key_heads, value_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key, value))
    if not enable_gqa:
        heads = key_heads = value_heads = _common(query, key, value, (heads, key_heads, value_heads))
    q, k = _four_dimensional(query, leading, heads), _four_dimensional(key, leading, key_heads)
    v = _four_dimensional(value, leading, value_heads)
    if key_heads != value_heads:  # PyTorch lets them group differently
        k, v = (_repeated("key", k, heads), _repeated("value", v, heads))
    return leading, (q, k, v), _mask(attn_mask, leading, (heads, q.shape[2], k.shape[2]), is_causal, q.device)


def _common(query: Tensor, key: Tensor, value: Tensor, heads: tuple[int, int, int]) -> int:
    """The number of heads to which all broadcast."""
    most = max(heads)
    if any(count != 1 and count != most for count in heads):
        got = ", ".join(shape_text(tensor.shape) for tensor in (query, key, value))
        fix = "Pass enable_gqa=True if query heads share keys."
        raise ShapeError("query, key, value", expected=f"equal numbers of heads, H = {most}", got=got, fix=fix)
    return most


def _repeated(name: str, tensor: Tensor, heads: int) -> Tensor:
    if heads % max(1, tensor.shape[1]):
        got = shape_text(tensor.shape)
        raise ShapeError(name, expected=f"a number of heads that divides {heads}", got=got)
    return tensor.repeat_interleave(heads // max(1, tensor.shape[1]), 1)


def _broadcast(*tensors: Tensor) -> tuple[int, ...]:
    """The sizes before (H, L, D), broadcast together."""
    try:
        return tuple(torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors)))
    except RuntimeError as error:
        got = ", ".join(shape_text(tensor.shape) for tensor in tensors)
        raise ShapeError("query, key, value", expected="leading sizes that broadcast", got=got) from error


def _four_dimensional(tensor: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    """(…, H, L, D) → (B, H, L, D), B the product of the leading sizes."""
    size = math.prod(leading)
    return tensor.expand(*leading, heads, *tensor.shape[-2:]).reshape(size, heads, *tensor.shape[-2:])


def _mask(
    attn_mask: Tensor | None,
    leading: tuple[int, ...],
    sizes: tuple[int, int, int],
    is_causal: bool,
    device: torch.device,
) -> Mask | None:
    rule = causal() if is_causal else None
    if attn_mask is None:
        return rule
    require_bool_or_float("attn_mask", attn_mask, "True = may attend")
    if attn_mask.device != device:
        expected, fix = f"query's device {device}", "Move it with .to(query.device)."
        raise DeviceError("attn_mask", expected=expected, got=str(attn_mask.device), fix=fix)
    full = (*leading, *sizes)
    given = tuple(attn_mask.shape)
    pairs = zip(reversed(given), reversed(full), strict=False)
    if len(given) > len(full) or any(size != 1 and size != whole for size, whole in pairs):
        got, expected = shape_text(given), f"a shape that broadcasts to {shape_text(full)}"
        raise ShapeError("attn_mask", expected=expected, got=got)
    # Leading sizes are one batch to the core, so that the mask's have to be expanded before they are merged.
    if attn_mask.dim() > 3 and len(leading) != 1:
        attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-3:])
        attn_mask = attn_mask.reshape(math.prod(leading), *attn_mask.shape[-3:])
    while attn_mask.dim() < 4:
        attn_mask = attn_mask.unsqueeze(0)
    mask = bias(attn_mask) if attn_mask.is_floating_point() else keep(attn_mask)
    return mask if rule is None else rule & mask
