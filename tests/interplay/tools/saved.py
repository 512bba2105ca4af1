"""Hooks on the tensors that autograd saves between a forward and a backward pass."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ..subject import Numbers, Subject, backward, forward
from ._tool import Tool


def _within(make: Callable[[], AbstractContextManager[Any]], subject: Subject) -> Numbers:
    inputs = subject.leaves()
    with make():
        outputs = forward(subject, inputs)
    return backward(subject, inputs, outputs)


def _hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[Subject], Numbers]:
    return partial(_within, partial(saved_tensors_hooks, pack, unpack))


class Marked(Tensor):
    """A subclass of tensors that changes nothing."""


def _to_half(tensor: Tensor) -> Any:
    return tensor.half() if tensor.dtype.is_floating_point else tensor


def _from_half(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _to_double(tensor: Tensor) -> tuple[torch.dtype, Tensor]:
    return tensor.dtype, tensor.double() if tensor.is_floating_point() else tensor


def _from_double(saved: tuple[torch.dtype, Tensor]) -> Tensor:
    return saved[1].to(saved[0])


def _permuted(tensor: Tensor) -> Tensor:
    """The same values, with the axes in another order in memory."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def _spread(tensor: Tensor) -> Tensor:
    """The same values, with gaps between them in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def _to_disk(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    return file.getvalue()


def _from_disk(content: bytes) -> Tensor:
    return torch.load(io.BytesIO(content))


def _same(tensor: Tensor) -> Tensor:
    return tensor


_NEEDS = frozenset({"gradients"})
TOOLS = (
    Tool("save_on_cpu", partial(_within, save_on_cpu), needs=_NEEDS),
    Tool("saved as halves", _hooks(_to_half, _from_half), needs=_NEEDS, tolerance=5e-3),
    Tool("saved permuted", _hooks(_permuted, _same), needs=_NEEDS | {"norms"}),
    Tool("saved with gaps", _hooks(_spread, _same), needs=_NEEDS | {"norms"}),
    Tool("saved cloned", _hooks(torch.clone, torch.clone), needs=_NEEDS),
    Tool("saved in a subclass", _hooks(lambda x: x.as_subclass(Marked), _same), needs=_NEEDS),
    Tool("saved on disk", _hooks(_to_disk, _from_disk), needs=_NEEDS),
    Tool("saved as float64", _hooks(_to_double, _from_double), needs=_NEEDS),
)
