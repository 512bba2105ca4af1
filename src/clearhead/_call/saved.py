"""What an autograd function saved, as it comes back: hooks on saved tensors may return something else.

`torch.autograd.graph.save_on_cpu` returns contiguous tensors, whatever was saved. Other hooks change the dtype, the
device or the strides, too. Every backward pass of ours reads its tensors through `restored`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import PLAIN
from .._torch_private import is_fake
from ..errors import DeviceError, DTypeError, ShapeError, shape_text
from ..masks._base import Mask
from .layout import Layout

#: Shape, dtype and device of a tensor.
Place = tuple[tuple[int, ...], torch.dtype, torch.device]

_STRIDED = torch.strided
_FIX = (
    "A hook on saved tensors (torch.autograd.graph.saved_tensors_hooks) may return other strides, another precision or "
    "another device, and nothing else."
)


def restored(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that came back, in the dtype and on the device that it had. Its strides may be others.

    Args:
        name: for messages, such as ``"saved query"``.
        x: what came back.
        shape, dtype, device: of the plain tensor that was saved.

    Raises:
        ShapeError, DTypeError, DeviceError: for a tensor that does not hold the saved numbers.
    """
    if x.layout is _STRIDED and x.dtype is dtype and x.shape == shape and x.device == device and type(x) in PLAIN:
        return x
    return _converted(name, x, shape, dtype, device)


def _converted(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if x.layout is not _STRIDED or x.is_nested:
        got = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
        raise DTypeError(name, expected="the dense tensor that was saved", got=got, fix=_FIX)
    if x.shape != shape:
        expected = f"the shape {shape_text(tuple(shape))} that was saved"
        raise ShapeError(name, expected=expected, got=shape_text(tuple(x.shape)), fix=_FIX)
    if x.is_meta and device.type != "meta":
        raise DeviceError(name, expected=f"numbers on {device}, where it was saved", got="a tensor on meta", fix=_FIX)
    # Floats hold the other dtypes' numbers, and not the other way round.
    if x.is_complex() or (dtype.is_floating_point and not x.is_floating_point()):
        raise DTypeError(name, expected=f"numbers of {dtype}, which was saved", got=str(x.dtype), fix=_FIX)
    converted = _in_memory(name, x).to(device, dtype)
    # A copy without a graph still says that a gradient is wanted.
    return converted.requires_grad_() if x.requires_grad and not converted.requires_grad else converted


def _in_memory(name: str, x: Tensor) -> Tensor:
    """The plain tensor that a subclass is, or computes."""
    if type(x) in PLAIN or is_fake(x):
        return x
    # One that waits for a collective, for example, has no memory of its own.
    plain = x.as_subclass(Tensor) if _has_memory(x) else x.clone()
    if type(plain) not in PLAIN:
        raise DTypeError(name, expected="a torch.Tensor, which was saved", got=type(x).__name__, fix=_FIX)
    return plain


def _has_memory(x: Tensor) -> bool:
    try:
        return x.numel() == 0 or x.data_ptr() != 0
    except RuntimeError:
        return False


def layouts_of(tensors: Sequence[Tensor | None]) -> list[Place | None]:
    """What `restored_all` compares; ``None`` for no tensor, and for a graph's, which come back as they were saved."""
    return [(x.shape, x.dtype, x.device) if type(x) in PLAIN else None for x in cast("Sequence[Tensor]", tensors)]


def restored_all(names: Sequence[str], returned: Sequence[Tensor], layouts: Sequence[Place | None]) -> Iterator[Tensor]:
    """`restored` for several tensors: these, and after the last name biases."""
    together: Any = zip_longest(names, returned, layouts, fillvalue="bias")
    for name, x, layout in together:
        yield x if layout is None else restored(f"saved {name}", x, *layout)


def restored_sinks(sinks: Tensor, layout: Layout) -> Tensor:
    """Sinks that came back, as kernels read them: float32 or float64, without gaps."""
    dtype = torch.float64 if sinks.dtype is torch.float64 else torch.float32
    shape = layout.query[:3] if "row_sinks" in layout.formula else layout.query[1:2]
    return restored("saved sinks", sinks, shape, dtype, layout.device).resolve_neg().contiguous()


def restored_biases(mask: Mask, returned: Iterator[Tensor]) -> Iterator[Tensor]:
    """The bias tensors of a mask that came back."""
    for original in mask.bias_tensors():
        x = next(returned)
        if x is not original and type(original) in PLAIN:
            x = restored("saved bias", x, original.shape, original.dtype, original.device)
        yield x


def with_saved(options: dict[str, Any], saved: Sequence[Tensor], returned: Sequence[Tensor]) -> dict[str, Any]:
    """The options of a call that have what came back instead of the tensors that were saved.

    Autograd notices writes to saved tensors only where no hook keeps copies. The copies then hold the numbers of the
    forward pass, and the tensors of the mask may not.

    Args:
        options: of the call.
        saved: the tensors of its mask and its positions.
        returned: what came back for them.
    """
    changed: dict[int, Tensor] = {}
    for x, original in zip(returned, saved, strict=True):
        if x is original or type(original) not in PLAIN:
            continue
        x = restored("saved mask or positions", x, original.shape, original.dtype, original.device)
        if not x.is_set_to(original):  # as activation checkpointing returns them
            changed[id(original)] = x
    if not changed:
        return {}
    biases = () if options["mask"] is None else options["mask"].bias_tensors()
    unchanged = {id(bias): bias for bias in biases}  # with their graphs, which cannot be copied
    names = ("mask", "query_positions", "key_positions")
    return deepcopy({name: options.get(name) for name in names}, {**unchanged, **changed})
