"""Checks of a call: of its tensors, sizes and numbers. They run where no plan of the call's layout is known."""

from __future__ import annotations

from typing import NoReturn, cast

import torch
from torch import Tensor

from .._checks import FLOATS, PLAIN, is_probability, number, same_device, strided
from ..errors import DTypeError, ShapeError, shape_text
from ..masks._grid import as_positions, require_fit
from .layout import Layout

#: As a logit its weight is 0 beside any score: a finite stand-in for −∞.
NO_SINK = -9.999999680285692e37
_READ = (torch.float32, torch.float64)  # dtypes of sinks in kernels
_STRIDED = torch.strided


def require_numbers(layout: Layout) -> None:
    """Raise unless scale, soft-cap and dropout probability are in range."""
    largest = torch.finfo(layout.compute_dtype).max
    number("scale", layout.scale, "a finite number, or None for 1/√D", lambda factor: -largest <= factor <= largest)
    number("dropout_p", layout.dropout_p, "a probability in [0, 1]", is_probability)
    if layout.softcap is not None:
        number("softcap", layout.softcap, "a number > 0, or None", lambda c: 0 < c <= largest)


def require_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless query, key and value have strides, one supported dtype and one device."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        strided(name, tensor)
        if tensor.dtype not in FLOATS:
            expected, fix = "float64, float32, bfloat16 or float16", "Convert it, for example with .float()."
            raise DTypeError(name, expected=expected, got=str(tensor.dtype), fix=fix)
        if tensor.dtype != query.dtype:
            fix = f"Convert it with .to({query.dtype})."
            raise DTypeError(name, expected=f"query's dtype {query.dtype}", got=str(tensor.dtype), fix=fix)
        same_device(name, tensor, query.device, "query's device")


def require_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the sizes of query, key and value fit together, with a batch or without one."""
    # A value that is the key is not named again.
    operands = {"query": query, "key": key} if value is key else {"query": query, "key": key, "value": value}
    dims = set(map(Tensor.dim, operands.values()))
    # First, because the other checks compare sizes by their place.
    if dims == {3, 4}:
        what = "numbers of dimensions: all (B, H, L, D), or all (H, L, D)"
        _mismatch(what, operands, "Add the batch with .unsqueeze(0).")
    for name, tensor in operands.items():
        if tensor.dim() not in (3, 4):
            fix = "clearhead.split_heads turns (B, L, H·D) into (B, H, L, D)."
            expected = "(B, H, L, D), or (H, L, D) for all without a batch"
            raise ShapeError(name, expected=expected, got=shape_text(tensor.shape), fix=fix)
        if tensor.dim() == 4 and tensor.shape[0] != query.shape[0]:
            fix = "Repeat the smaller with .expand, or check that they belong together."
            _mismatch("batch sizes (B)", operands, fix)
    if key.shape[-1] != query.shape[-1]:
        expected = f"head_dim D = {query.shape[-1]} as in query {shape_text(query.shape)}"
        fix = "Project both to the same size; only values may have another."
        raise ShapeError("key", expected=expected, got=shape_text(key.shape), fix=fix)
    if value.shape[-3] != key.shape[-3]:
        _mismatch("key/value head counts (Hkv)", operands, "Each key head needs its value head.")
    if value.shape[-2] != key.shape[-2]:
        _mismatch("key and value lengths (S)", operands, "Each key needs its value.")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads == 0 or heads % kv_heads:
        expected, got = (
            f"a head count that divides the query's H = {heads}",
            f"Hkv = {kv_heads} in {shape_text(key.shape)}",
        )
        fix = "Heads are the second dimension: (B, H, L, D), not (B, L, H, D)."
        raise ShapeError("key", expected=expected, got=got, fix=fix)


def _mismatch(what: str, operands: dict[str, Tensor], fix: str) -> NoReturn:
    shapes = ", ".join(f"{name} {shape_text(tensor.shape)}" for name, tensor in operands.items())
    raise ShapeError(", ".join(operands), expected=f"equal {what}", got=shapes, fix=fix)


def read_positions(name: str, positions: object, tensor: Tensor, *, heads: int | None = None) -> Tensor | int | None:
    """Positions as masks read them, (1 or B, n), or (B, H, n) with `heads`.

    Raises:
        ShapeError, DTypeError, DeviceError: unless they fit a (B, H, n, D) tensor.
    """
    result = as_positions(name, positions, per_head=heads is not None)
    if isinstance(result, Tensor):
        same_device(name, result, tensor.device, "query's device")
        require_fit(name, cast(Tensor, positions), tensor.shape[0], tensor.shape[2], heads)
    return result


def read_sinks(sinks: Tensor, query: Tensor, heads: int) -> Tensor:
    """Sinks as the native kernel reads them: float32 or float64, without gaps. A sink of −∞ is no sink."""
    if _are_read_as_they_are(sinks, query, heads):
        return sinks.resolve_neg()
    expected = f"a float tensor ({heads},)"
    if strided("sinks", sinks, expected).dtype not in FLOATS:
        raise DTypeError("sinks", expected=expected, got=str(sinks.dtype))
    if sinks.shape != (heads,):
        expected, fix = f"one logit per query head, ({heads},)", "Grouped heads have one sink per query head too."
        raise ShapeError("sinks", expected=expected, got=shape_text(sinks.shape), fix=fix)
    same_device("sinks", sinks, query.device, "query's device")
    return (sinks if sinks.dtype in _READ else sinks.float()).resolve_neg().contiguous()


def _are_read_as_they_are(sinks: Tensor, query: Tensor, heads: int) -> bool:
    """Whether sinks pass every check and have no gaps, as a module's parameter does."""
    if type(sinks) not in PLAIN or sinks.dtype not in _READ or sinks.shape != (heads,):
        return False
    is_near = sinks.is_cpu is query.is_cpu is True or sinks.device == query.device
    return is_near and sinks.layout is _STRIDED and sinks.is_contiguous() and not sinks.is_nested
