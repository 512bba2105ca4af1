"""What PyTorch's own fused kernels save, given back to them with the strides that it had.

They choose how to read their tensors in the forward pass: rows with gaps between their elements, which hooks on saved
tensors may return, make their gradients wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._call.call import Call, Results
from .._call.saved import restored
from .._torch_private import saving_hooks
from ._base import Plan

#: A tensor as a hook packs it; its shape, dtype and device; its strides.
Packed = tuple[object, tuple[tuple[int, ...], torch.dtype, torch.device], tuple[int, ...]]


def saved_as_given(compute: Plan, call: Call) -> Results:
    """The results of a plan, inside hooks that put strides, dtype and device right after the user's own hooks."""
    hooks = saving_hooks(False)
    if hooks is None:
        return compute(call)
    pack, unpack = hooks

    def pack_layout(x: Tensor) -> Packed:
        return pack(x), (x.shape, x.dtype, x.device), x.stride()

    def unpack_layout(packed: Packed) -> Tensor:
        value, layout, strides = packed
        return _with_strides(restored("saved tensor", unpack(value), *layout), strides)

    with saved_tensors_hooks(pack_layout, unpack_layout):
        return compute(call)


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor, or a copy with these strides. If they overlap, other than by broadcasting, it is contiguous."""
    if x.stride() == strides and not x.is_neg():
        return x
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    end = 0  # of the elements before
    for stride, size in sorted(zip(strides, once.shape, strict=True)):
        if size > 1 and stride <= end:
            return x.resolve_neg().contiguous()
        end += stride * (size - 1)
    return once.new_empty_strided(once.shape, strides).copy_(once).expand(x.shape)
