"""The arguments of the backward operator as they are declared, from those that a graph's autograd gives back.

A graph saves its tensors through autograd, so that hooks may return others: see `restored`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .._call.saved import restored
from ..errors import ArgumentError, ShapeError, shape_text
from ._native_arguments import NativeArguments

CPU = torch.device("cpu")
_DTYPES = {
    "sinks": torch.float32,
    "first": torch.int64,
    "last": torch.int64,
    "visible": torch.bool,
    "bias": torch.float32,
    "selected": torch.int32,
    "seed": torch.int64,
}


def as_declared(arguments: NativeArguments, output_gradient: Tensor) -> NativeArguments:
    """The arguments of a forward pass, checked against the gradient of its output (B, H, L, Dv), which is as it was.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: for tensors that do not hold the saved numbers.
    """
    batch, heads, length, value_dim = output_gradient.shape
    query, key, value, *others = arguments[:12]
    kv_heads, keys = key.shape[1:3] if key.dim() == 4 else (0, 0)
    if kv_heads == 0 or heads % kv_heads:
        expected = f"(B, Hkv, S, D) with an Hkv that divides H = {heads}"
        raise ShapeError("saved key", expected=expected, got=shape_text(key.shape))
    dtype, dim = output_gradient.dtype, query.shape[-1] if query.dim() else 0
    query = restored("saved query", query, (batch, heads, length, dim), dtype, CPU)
    key = restored("saved key", key, (batch, kv_heads, keys, dim), dtype, CPU)
    value = restored("saved value", value, (batch, kv_heads, keys, value_dim), dtype, CPU)
    of_rows = arguments.sinks is not None and arguments.sinks.dim() > 1
    whole = {
        "sinks": (batch, heads, length) if of_rows else (heads,),
        **dict.fromkeys(("first", "last"), (batch, length)),
        **dict.fromkeys(("visible", "bias"), (batch, heads, length, keys)),
        "selected": _of_selected(arguments.selected, batch, heads, length),
        "seed": (),
    }
    changed = {}
    if any(x is not None for x in others):
        tensors = {name: getattr(arguments, name) for name in _DTYPES}
        changed = {name: _of_mask(name, x, whole[name]) for name, x in tensors.items() if x is not None}
        for name, tokens in (("cu_seqlens_q", length), ("cu_seqlens_k", keys)):
            if (bounds := getattr(arguments, name)) is not None:
                changed[name] = _boundaries(name, bounds, tokens)
    return arguments._replace(query=query, key=key, value=value, **changed)


def _of_selected(selected: Tensor | None, batch: int, heads: int, length: int) -> tuple[int, ...]:
    """The whole shape of lists of keys, of whose heads and numbers nothing else tells."""
    if selected is None or selected.dim() != 4 or selected.shape[1] == 0 or heads % selected.shape[1]:
        return batch, heads, length, -1
    return batch, selected.shape[1], length, selected.shape[3]


def _of_mask(name: str, x: Tensor, whole: tuple[int, ...]) -> Tensor:
    """A tensor of these sizes, or with sizes of 1, which broadcast. The kernel reads all but 4-D ones without gaps."""
    sizes = whole
    if x.dim() == len(whole) and name != "sinks":
        sizes = tuple(1 if size == 1 else full for size, full in zip(x.shape, whole, strict=True))
    x = restored(f"saved {name}", x, sizes, _DTYPES[name], CPU).resolve_neg()
    return x if x.dim() == 4 else x.contiguous()


def _boundaries(name: str, bounds: Tensor, tokens: int) -> Tensor:
    """Boundaries of packed sequences, which the kernel uses as addresses: from 0 to all tokens, and never back."""
    bounds = restored(f"saved {name}", bounds, (bounds.numel(),), torch.int64, CPU).contiguous()
    numbers = bounds.tolist()
    if not numbers or numbers[0] != 0 or numbers[-1] != tokens or any(a > b for a, b in pairwise(numbers)):
        expected, fix = f"boundaries from 0 to {tokens}, as they were saved", "A hook must not round integers."
        raise ArgumentError(f"saved {name}", expected=expected, got="other numbers", fix=fix)
    return bounds
