"""`torch.nn.functional`'s attention, on Clearhead's core."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from .._attention import attention
from .._checks import flag, same_device, strided
from .._proxies import recorded_call
from ..errors import ClearheadError, ShapeError, shape_text
from ..masks import bias, causal, keep
from ..masks._base import Mask
from ..masks._of_tensor import broadcasts
from ._convention import also_pytorchs, require_bool_or_float
from ._jagged import jagged_attention

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

    It differs from PyTorch's function in three ways. The output of a fully masked row is zero on every kernel. NaN in
    masked keys and values does not spread. `is_causal` and `attn_mask` may be combined, which some of PyTorch's
    kernels refuse.

    Args:
        query: (…, H, L, D). Leading sizes broadcast. Query, key and value may all be jagged (B, H, lengths, D), from
            ``torch.nested`` with ``layout=torch.jagged`` and ``.transpose(1, 2)``. They then attend within each
            sequence, without a mask, and `is_causal` counts from its first token.
        key: (…, H, S, D), or (…, Hkv, S, D) with `enable_gqa`.
        value: (…, H, S, Dv), or (…, Hkv, S, Dv) with `enable_gqa`.
        attn_mask: broadcasts to (…, H, L, S). Bool ``True`` = may attend. Float is added to the scores.
        dropout_p: probability that a weight is dropped, in every mode. Default 0.
        is_causal: query i attends to keys j ≤ i. Default False.
        scale: factor of the scores. Default 1/√D.
        enable_gqa: let several query heads share a key/value head. Default False.

    Returns:
        (…, H, L, Dv), jagged like the query.

    Raises:
        ShapeError, DTypeError, ArgumentError: for invalid arguments. They are also `RuntimeError`s, as PyTorch's are.

    Example:
        >>> import torch, clearhead
        >>> q, k, v = torch.randn(3, 2, 5, 8).unbind(0)
        >>> clearhead.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 5, 8])
    """
    try:
        # Grouped heads, and leading sizes that broadcast, are translated.
        if attn_mask is None and enable_gqa is False and _have_equal_heads(query, key, value):
            mask = causal() if is_causal is True or flag("is_causal", is_causal) else None
            return attention(query, key, value, mask, scale=scale, dropout_p=dropout_p)
        if isinstance(query, Tensor) and query.is_nested and query.layout is torch.jagged:
            inputs = query, key, value
            return jagged_attention(inputs, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        leading, (q, k, v), mask = translate(query, key, value, attn_mask, is_causal, enable_gqa)
        output = attention(q, k, v, mask, scale=scale, dropout_p=dropout_p)
    except ClearheadError as error:
        return recorded_call(scaled_dot_product_attention, also_pytorchs(error), locals())
    return output if output.shape[:-2] == leading else output.reshape(*leading, *output.shape[-2:])


def _have_equal_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all are ordinary tensors (B, H, length, features), as `attention` takes them."""
    if not type(query) is type(key) is type(value) is Tensor:
        return False
    try:
        a, b, c = query.shape, key.shape, value.shape
    except RuntimeError:  # of nested tensors, which have no sizes
        return False
    return len(a) == len(b) == len(c) == 4 and a[0] == b[0] == c[0] and a[1] == b[1] == c[1] != 0


def translate(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor], Mask | None]:
    """The sizes before (L, Dv) of the output, query, key and value as (B, H, L, D), and the mask.

    B is the product of the sizes before the heads.
    """
    tensors = query, key, value
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if strided(name, tensor).dim() < 2:
            raise ShapeError(name, expected="at least (length, features)", got=shape_text(tensor.shape))
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    outer = [tensor.shape[: -3 if enable_gqa else -2] for tensor in tensors]
    try:
        same = outer[0] == outer[1] == outer[2]
        leading = tuple(outer[0] if same else torch.broadcast_shapes(*outer))
    except RuntimeError as error:
        expected = "leading sizes that broadcast" if enable_gqa else "equal numbers of heads, and sizes that broadcast"
        fix = ""
        with suppress(RuntimeError):  # unless the sizes before the heads do not broadcast either
            torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
            fix = "" if enable_gqa else "Pass enable_gqa=True if query heads share keys."
        got = ", ".join(shape_text(tensor.shape) for tensor in tensors)
        raise ShapeError("query, key, value", expected=expected, got=got, fix=fix) from error
    if enable_gqa:
        heads, key_heads, value_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in tensors)
    else:
        heads = key_heads = value_heads = leading[-1] if leading else 1
        leading = leading[:-1]
    q, k = _four_dimensional(query, leading, heads), _four_dimensional(key, leading, key_heads)
    v = _four_dimensional(value, leading, value_heads)
    if key_heads != value_heads:  # PyTorch lets keys and values have different groups
        k, v = _repeated("key", k, heads), _repeated("value", v, heads)
    mask = _mask(attn_mask, (*leading, heads, q.shape[2], k.shape[2]), is_causal, q.device)
    if max(tensor.dim() for tensor in tensors) > 2:
        leading = *leading, heads
    if heads == key_heads == 0:  # an empty call, which has a batch of 0 as well
        q, k, v = (tensor.reshape(0, 1, *tensor.shape[2:]) for tensor in (q, k, v))
        mask = None
    return leading, (q, k, v), mask


def _repeated(name: str, tensor: Tensor, heads: int) -> Tensor:
    if heads % max(1, tensor.shape[1]):
        got = shape_text(tensor.shape)
        raise ShapeError(name, expected=f"a number of heads that divides {heads}", got=got)
    return tensor.repeat_interleave(heads // max(1, tensor.shape[1]), 1)


def _four_dimensional(tensor: Tensor, leading: tuple[int, ...], heads: int) -> Tensor:
    """(…, H, L, D) → (B, H, L, D), B the product of the leading sizes."""
    if len(leading) == 1 and tensor.shape[:-2] == (*leading, heads):
        return tensor
    full = tensor.expand(*leading, heads, *tensor.shape[-2:])
    return full.reshape(math.prod(leading), *full.shape[-3:])


def _mask(attn_mask: Tensor | None, sizes: tuple[int, ...], is_causal: bool, device: torch.device) -> Mask | None:
    if attn_mask is None:
        return causal() if is_causal else None
    require_bool_or_float("attn_mask", attn_mask, "True = may attend")
    same_device("attn_mask", attn_mask, device, "query's device")
    shape, leading = tuple(attn_mask.shape), sizes[:-3]
    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    if len(shape) > len(sizes) or not all(broadcasts(*pair) for pair in pairs):
        raise ShapeError("attn_mask", expected=f"a shape that broadcasts to {shape_text(sizes)}", got=shape_text(shape))
    # The leading sizes become one batch, so those of the mask are expanded first.
    if len(shape) > 3 and len(leading) != 1:
        attn_mask = _four_dimensional(attn_mask, leading, shape[-3])
    attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    mask = bias(attn_mask) if attn_mask.is_floating_point() else keep(attn_mask)
    return causal() & mask if is_causal else mask
