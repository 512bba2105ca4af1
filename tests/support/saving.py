"""Hooks on saved tensors: what autograd gives back to a backward pass may lie otherwise than what was saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor


class Tagged(Tensor):
    """A subclass that only has another name."""


def returning(change: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    """Hooks that return something else than was saved."""
    return lambda: saved_tensors_hooks(lambda x: x, change)


def of_floats(change: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    return returning(lambda x: change(x) if x.is_floating_point() else x)


def _permuted(x: Tensor) -> Tensor:
    """The same numbers with the last dimension first in memory."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1) if x.dim() > 1 else x


def _with_gaps(x: Tensor) -> Tensor:
    """The same numbers as every second one of a larger memory, which holds NaN between them."""
    return torch.stack([x, torch.full_like(x, torch.nan) if x.is_floating_point() else x], -1)[..., 0]


def _in_larger(x: Tensor) -> Tensor:
    """The same numbers in the middle of a larger memory, whose rows are longer."""
    larger = x.new_zeros([size + 2 for size in x.shape])
    part = larger[tuple(slice(1, -1) for _ in x.shape)]
    return part.copy_(x)


def _expanded(x: Tensor) -> Tensor:
    """The same numbers, broadcast along dimensions whose numbers are equal."""
    once = x
    for dim in range(x.dim()):
        if x.shape[dim] > 1 and bool((once == once.narrow(dim, 0, 1)).all()):
            once = once.narrow(dim, 0, 1)
    return once.clone().expand(x.shape)


#: Hooks that keep every number.
EXACT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "save_on_cpu": lambda: save_on_cpu(pin_memory=True),  # a contiguous copy, also without a GPU
    "save_on_cpu, not pinned": save_on_cpu,
    "permuted": returning(_permuted),
    "gaps": returning(_with_gaps),
    "in larger": returning(_in_larger),
    "expanded": returning(_expanded),
    "float64": of_floats(Tensor.double),
    "subclass": returning(lambda x: x.as_subclass(Tagged)),
    "negated": of_floats(lambda x: torch._neg_view(-x)),
}
#: Hooks that round to half precision.
ROUNDED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "half, returned as float32": of_floats(lambda x: x.half().float()),
    "half": of_floats(Tensor.half),
}
#: Hooks that lose what was saved, and what an error says came back.
LOSING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "shorter": (lambda x: x[..., :-1], r"shape"),
    "no batch": (lambda x: x[0], r"shape"),
    "flat": (Tensor.flatten, r"shape"),
    "meta": (lambda x: x.to("meta"), r"a tensor on meta"),
    "complex": (lambda x: torch.complex(x.float(), x.float()), r"torch.complex64"),
    "sparse": (Tensor.to_sparse, r"a tensor of layout torch.sparse_coo"),
    "wrapper": (lambda x: TwoTensor(x, x), r"TwoTensor"),
}
