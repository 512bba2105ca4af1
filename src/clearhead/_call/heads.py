"""From one long feature vector to several heads, and back."""

from __future__ import annotations

from torch import Tensor

from .._checks import integer, strided
from ..errors import ShapeError, shape_text


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut the features of every position into heads: (B, L, H·D) → (B, H, L, D).

    Args:
        x: (B, L, H·D), or (L, H·D) without a batch.
        num_heads: H.

    Returns:
        A view, (B, H, L, D) or (H, L, D).

    Raises:
        ShapeError: if `x` has no feature dimension or H does not divide it.
        ArgumentError: if `num_heads` is not positive.
        DTypeError: if `x` is no tensor or `num_heads` no int.

    Example:
        >>> import torch
        >>> split_heads(torch.zeros(2, 5, 12), num_heads=3).shape
        torch.Size([2, 3, 5, 4])
    """
    strided("x", x)
    integer("num_heads", num_heads, least=1)
    if x.dim() not in (2, 3) or x.shape[-1] % num_heads:
        expected = f"(B, L, H·D) with H = {num_heads} heads dividing the last size"
        raise ShapeError("x", expected=expected, got=shape_text(x.shape))
    return x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).transpose(-3, -2)  # (B, H, L, D)


def merge_heads(x: Tensor) -> Tensor:
    """Join the heads of every position: (B, H, L, D) → (B, L, H·D).

    Args:
        x: (B, H, L, D), or (H, L, D) without a batch.

    Returns:
        (B, L, H·D) or (L, H·D).

    Raises:
        ShapeError: for other shapes.

    Example:
        >>> import torch
        >>> merge_heads(torch.zeros(2, 3, 5, 4)).shape
        torch.Size([2, 5, 12])
    """
    strided("x", x)
    if x.dim() not in (3, 4):
        raise ShapeError("x", expected="(B, H, L, D) or (H, L, D)", got=shape_text(x.shape))
    return x.transpose(-3, -2).flatten(-2)  # (B, L, H·D)


def fold_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """Join the rows of the query heads that share a key/value head: (B, H, L, D) → (B, Hkv, G·L, D)."""
    batch, heads, length, dim = x.shape
    # A view if heads lie one after another in memory, as in a contiguous (B, H, L, D).
    return x.reshape(batch, num_kv_heads, (heads // num_kv_heads) * length, dim)


def unfold_group(x: Tensor, num_heads: int) -> Tensor:
    """The inverse of `fold_group`: (B, Hkv, G·L, D) → (B, H, L, D)."""
    batch, kv_heads, rows, dim = x.shape
    return x.reshape(batch, num_heads, rows * kv_heads // num_heads, dim)
