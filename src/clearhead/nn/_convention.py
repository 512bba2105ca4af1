"""PyTorch's mask convention (bool ``True`` = hidden, float = added) translated into Clearhead's masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import FLOATS, strided
from ..errors import DTypeError, ShapeError, shape_text
from ..masks import bias, causal, drop
from ..masks._base import Mask
from ..masks._combined import Not, Or, all_of
from ..masks._grid import Grid
from ..masks._positional import prefix
from ._sharing import shared_in_forward


def hidden_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, grid: Grid, appended: int = 0
) -> Mask | None:
    """Combine `nn.MultiheadAttention`'s three ways to hide keys; a key must be allowed by all of them.

    Args:
        attn_mask, key_padding_mask, is_causal: as for `nn.MultiheadAttention`.
        grid: N, H, L and S, without the keys that the module appends.
        appended: how many always visible keys it appends to the S.
    """
    tensors = attn_mask, key_padding_mask
    if attn_mask is key_padding_mask is None:  # rules alone are lowered as fast as they are looked up
        return _translated(*tensors, is_causal, grid, appended)
    return shared_in_forward(
        tensors, (is_causal, grid, appended), lambda: _translated(*tensors, is_causal, grid, appended)
    )


def _translated(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, grid: Grid, appended: int
) -> Mask | None:
    parts: list[Mask | None] = []
    if is_causal:
        # Appended keys stand behind the last: a causal mask alone would hide them from most queries.
        parts.append(causal() if appended == 0 else Or(causal(), Not(prefix(grid.key_length))))
    if attn_mask is not None:
        require_bool_or_float("attn_mask", attn_mask, "True = hidden")
        parts.append(_tensor_mask(_four_dimensional(attn_mask, grid), appended))
    if key_padding_mask is not None:
        require_bool_or_float("key_padding_mask", key_padding_mask, "True = hidden")
        parts.append(_tensor_mask(_per_key(key_padding_mask, grid), appended))
    return all_of(parts)


def _tensor_mask(tensor: Tensor, appended: int) -> Mask:
    if appended:
        tensor = F.pad(tensor, (0, appended))  # False and 0.0 both leave the appended keys visible
    return bias(tensor) if tensor.is_floating_point() else drop(tensor)


def _four_dimensional(attn_mask: Tensor, grid: Grid) -> Tensor:
    """(L, S), (N·H, L, S), (N, L, S) or (N, H, L, S) → (1 or N, 1 or H, L, S)."""
    batch, heads, length, keys = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length
    shape = tuple(attn_mask.shape)
    if shape == (length, keys):
        return attn_mask[None, None]
    if shape == (batch * heads, length, keys):
        return attn_mask.unflatten(0, (batch, heads))
    if shape == (batch, length, keys):
        return attn_mask[:, None]
    if shape == (batch, heads, length, keys):
        return attn_mask
    raise ShapeError(
        "attn_mask",
        expected=f"(L, S) = ({length}, {keys}), (N·H, L, S) = ({batch * heads}, {length}, {keys}), "
        f"(N, L, S) = ({batch}, {length}, {keys}) or (N, H, L, S) = ({batch}, {heads}, {length}, {keys})",
        got=shape_text(shape),
        fix="Marks per key, (N, S), go into key_padding_mask." if shape == (batch, keys) else "",
    )


def _per_key(key_padding_mask: Tensor, grid: Grid) -> Tensor:
    """(N, S), or (S,) without a batch → (N, 1, 1, S)."""
    expected = (grid.batch_size, grid.key_length)
    if tuple(key_padding_mask.shape) != expected:
        raise ShapeError(
            "key_padding_mask",
            expected=f"(N, S) = {shape_text(expected)}, or (S,) without a batch",
            got=shape_text(key_padding_mask.shape),
            fix="It is batch first, whatever batch_first says." if key_padding_mask.shape == expected[::-1] else "",
        )
    return key_padding_mask[:, None, None, :]


def require_bool_or_float(name: str, mask: object, meaning: str) -> None:
    """Raise unless a mask is a bool tensor, which has this meaning, or a float one."""
    if not isinstance(mask, Tensor):
        raise DTypeError(
            name,
            expected="a torch.Tensor, bool or float",
            got=type(mask).__name__,
            fix="Masks of clearhead.masks go into clearhead.MultiHeadAttention." if isinstance(mask, Mask) else "",
        )
    if strided(name, mask).dtype != torch.bool and mask.dtype not in FLOATS:
        raise DTypeError(
            name,
            expected=f"bool ({meaning}) or float (added to the scores)",
            got=str(mask.dtype),
            fix=f"Write mask.bool() if non-zero means {meaning.removeprefix('True = ')}.",
        )
