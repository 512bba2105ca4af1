"""Attention's operands in a layer: heads of projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from .._call.heads import split_heads


@dataclass(slots=True)
class Operands:
    """Attention's operands, and the function that is applied to its output.

    Args:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        finish: applied to the output (B, H, L, Dv). ``None`` leaves the output as it is.
        observed: the queries that a cache observes, (B, H, L, D of the cache), or ``None``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    finish: Callable[[Tensor], Tensor] | None = None
    observed: Tensor | None = None


def heads_of(x: Tensor, num_heads: int, norm: nn.Module | None, *, one_row: bool = False) -> Tensor:
    """(B, L, H·D), or (L, H·D) without a batch → (B or 1, H, L, D), normed. Of one row heads are split in one step."""
    if one_row and x.dim() == 3:
        heads = x.view(x.shape[0], num_heads, 1, x.shape[2] // num_heads)
    elif x.dim() == 3:
        # Not `split_heads`, whose checks cost small calls as much as the view. Projections always fit.
        batch, length, features = x.shape
        heads = x.view(batch, length, num_heads, features // num_heads).transpose(1, 2)
    else:
        heads = split_heads(x, num_heads)[None]
    return heads if norm is None else norm(heads)
