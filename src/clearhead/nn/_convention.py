"""PyTorch's conventions: its masks (bool ``True`` = hidden, float = added) as Clearhead's, and the types of its errors.

PyTorch's attention raises `AssertionError` or `RuntimeError` for invalid arguments, and `AttributeError` for arguments
that are not tensors. Code that catches these types catches Clearhead's errors too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import errors
from .._checks import FLOATS, strided
from ..errors import shape_text
from ..masks import bias, causal, drop
from ..masks._base import Mask
from ..masks._combined import Not, Or, all_of
from ..masks._positional import Prefix
from ..masks._tensors import KeepKeys
from ._stacks import shared_in_forward

#: N, H, L and S.
Sizes = tuple[int, int, int, int]


def hidden_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, sizes: Sizes, appended: int = 0
) -> Mask | None:
    """Combine the masks of `nn.MultiheadAttention`. A query may attend to the keys that none of them hides.

    The module appends `appended` keys after the S, which are always visible.
    """

    def translate() -> Mask | None:
        translated: list[Mask | None] = []
        if is_causal:
            # A causal mask would hide the appended keys, which come last, from most queries.
            translated.append(causal() if appended == 0 else Or(causal(), Not(Prefix(sizes[3]))))
        if attn_mask is not None:
            translated.append(_tensor_mask(_four_dimensional(attn_mask, sizes), appended))
        if key_padding_mask is not None:
            translated.append(_key_mask(key_padding_mask, sizes, appended))
        return all_of(translated)

    if attn_mask is key_padding_mask is None:  # lowering a rule costs as little as finding a shared mask
        return translate()
    return shared_in_forward((attn_mask, key_padding_mask), (is_causal, sizes, appended), translate)


def _tensor_mask(tensor: Tensor, appended: int) -> Mask:
    if appended:
        tensor = F.pad(tensor, (0, appended))  # False and 0.0 both leave the appended keys visible
    return bias(tensor) if tensor.is_floating_point() else drop(tensor)


def _four_dimensional(attn_mask: Tensor, sizes: Sizes) -> Tensor:
    """(L, S), (N·H, L, S), (N, L, S) or (N, H, L, S) → (1 or N, 1 or H, L, S)."""
    require_bool_or_float("attn_mask", attn_mask, "True = hidden")
    (batch, heads), scores = sizes[:2], sizes[2:]
    shape, of_heads = tuple(attn_mask.shape), (batch * heads, *scores)
    of_items, full = (batch, *scores), sizes
    if shape == scores:
        return attn_mask[None, None]
    if shape == of_heads:
        return attn_mask.unflatten(0, (batch, heads))
    if shape == of_items:
        return attn_mask[:, None]
    if shape == full:
        return attn_mask
    expected = (
        f"(L, S) = {shape_text(scores)}, (N·H, L, S) = {shape_text(of_heads)}, (N, L, S) = {shape_text(of_items)}"
    )
    expected = f"{expected} or (N, H, L, S) = {shape_text(full)}"
    fix = "Marks per key, (N, S), go into key_padding_mask." if shape == (batch, sizes[3]) else ""
    raise errors.ShapeError("attn_mask", expected=expected, got=shape_text(shape), fix=fix)


def _key_mask(key_padding_mask: Tensor, sizes: Sizes, appended: int) -> Mask:
    require_bool_or_float("key_padding_mask", key_padding_mask, "True = hidden")
    expected = sizes[0], sizes[3]
    shape = tuple(key_padding_mask.shape)
    if shape != expected:
        fix = "It is batch first, whatever batch_first says." if shape == expected[::-1] else ""
        text = f"(N, S) = {shape_text(expected)}, or (S,) without a batch"
        raise errors.ShapeError("key_padding_mask", expected=text, got=shape_text(shape), fix=fix)
    if appended:
        key_padding_mask = F.pad(key_padding_mask, (0, appended))
    if key_padding_mask.is_floating_point():
        return bias(key_padding_mask[:, None, None, :])
    return KeepKeys("drop", ~key_padding_mask)


def require_bool_or_float(name: str, mask: object, meaning: str) -> None:
    """Raise unless a mask is a bool tensor, which has this meaning, or a float one."""
    if not isinstance(mask, Tensor):
        fix = "Masks of clearhead.masks go into clearhead.MultiHeadAttention." if isinstance(mask, Mask) else ""
        raise errors.DTypeError(name, expected="a torch.Tensor, bool or float", got=type(mask).__name__, fix=fix)
    if strided(name, mask).dtype not in (torch.bool, *FLOATS):
        expected, fix = f"bool ({meaning}) or float (added to the scores)", meaning.removeprefix("True = ")
        raise errors.DTypeError(
            name, expected=expected, got=str(mask.dtype), fix=f"Write mask.bool() if non-zero means {fix}."
        )


class ShapeError(errors.ShapeError, AssertionError, RuntimeError):
    """See `clearhead.errors.ShapeError`."""


class DTypeError(errors.DTypeError, AssertionError, RuntimeError, AttributeError):
    """See `clearhead.errors.DTypeError`."""


class DeviceError(errors.DeviceError, AssertionError, RuntimeError):
    """See `clearhead.errors.DeviceError`."""


class ArgumentError(errors.ArgumentError, AssertionError, RuntimeError):
    """See `clearhead.errors.ArgumentError`."""


def also_pytorchs(error: errors.ClearheadError) -> errors.ClearheadError:
    """The same error as an instance of PyTorch's types too, with its cause and its notes."""
    for kind in (ShapeError, DTypeError, DeviceError, ArgumentError):
        if isinstance(error, kind.__mro__[1]):
            converted = kind(*error.args)
            converted.__cause__ = error.__cause__
            for note in getattr(error, "__notes__", ()):
                converted.add_note(note)
            return converted
    return error
