"""Differentiable collectives on parts of unequal length, made of the public ones of `torch.distributed`.

Every gradient is that of the sum of what all processes compute: a tensor that went to several of them gets the sum of
their gradients. float16 and bfloat16 gradients are summed in float32, as one process accumulates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._environment import is_tracing
from .._torch_private import all_gather_single, reduce_scatter_single
from ..errors import ClearheadError, DistributedError, KernelError
from ._layout import Parts

Group = dist.ProcessGroup

#: Tensors for every process of a group.
Pieces = Sequence[Sequence[Tensor]]
Shapes = Sequence[Sequence[int]]

#: Tensors of this device travel by gloo, which copies what it gathers and scatters to and from buffers of its own: for
#: 16 MB between two processes an all-gather takes three times as long as an all-to-all.
GLOO_DEVICE = "cpu"


@contextmanager
def step(name: str, where: str = "context_parallel") -> Generator[None, None, None]:
    """Name the step in which a collective fails, as it does within the group's time-out if a process has ended.

    Args:
        name: of the step.
        where: the function that split the module.

    Raises:
        DistributedError: for what `torch.distributed` raises inside the block.
    """
    try:
        yield
    except ClearheadError:
        raise
    except RuntimeError as error:
        fix = "Another process has ended, or waits in another call; look at what it said first."
        raise DistributedError(f"{where}: {name}: the exchange failed. {fix} ({error})") from error


Backward = Callable[..., "tuple[Tensor | None, ...]"]


def differentiable_once(backward: Backward) -> Backward:
    """Decorator of the backward pass of a function: what it returns can be computed with, but not differentiated.

    PyTorch's `once_differentiable` leaves out what the gradients do not depend on through the incoming ones alone:
    ``autograd.grad(…, allow_unused=True)`` then gives ``None`` for a second derivative that is not zero. Here the
    returned gradients depend on all that the pass reads, so that asking for a second derivative raises.

    Raises:
        KernelError: in the backward pass of what is returned.
    """

    @wraps(backward)
    def computed(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if is_tracing() or not torch.is_grad_enabled():  # graphs have no second derivatives
            return found
        read = [x for x in (*gradients, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        if not read:
            return found
        where = getattr(ctx, "where", "context_parallel")
        return tuple(x if x is None else cast(Tensor, _Once.apply(where, x, *read)) for x in found)

    return computed


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, where: str, found: Tensor, *read: Tensor) -> Tensor:
        ctx.where = where
        return found.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise KernelError(
            f"{ctx.where}: second derivatives do not follow exchanges. "
            "Take them of a module that is not split, or of one after tensor_parallel alone."
        )


def from_every_rank(x: Tensor, group: Group) -> Tensor:
    """The tensors of all processes, which have one shape: (W, *shape). Without gradients."""
    found = x.new_empty((dist.get_world_size(group), *x.shape))
    all_gather_single(found, x.contiguous()[None], group=group)
    return found


def sum_of_own(parts: Tensor, group: Group) -> Tensor:
    """The sum over all processes of ``parts[r]`` (W, …), on process r: one reduce-scatter. Without gradients."""
    found = torch.empty_like(parts[0])
    if parts.device.type == GLOO_DEVICE:  # a third of the time for a list
        dist.reduce_scatter(found, list(parts), group=group)
    else:
        reduce_scatter_single(found[None], parts, group=group)
    return found


def gather_parts(
    tensors: Sequence[Tensor], parts: Parts, group: Group, where: str = "context_parallel"
) -> tuple[Tensor, ...]:
    """The whole sequences (L, …) of which each process holds a part (l, …): one all-gather of tensors of one dtype.

    On gloo it is one all-to-all. Their gradients are summed over all processes, by one reduce-scatter.
    """
    return cast("tuple[Tensor, ...]", _GatherParts.apply(parts, group, where, *tensors))


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, group: Group, where: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parts, ctx.group, ctx.where, ctx.shapes = parts, group, where, [x.shape for x in tensors]
        with step("forward: all-gather", where):
            return tuple(parts.join(each, 0) for each in _all_gather(tensors, parts, group))

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        parts, dtype = ctx.parts, sum_dtype(gradients[0])
        features = sum(math.prod(shape[1:]) for shape in ctx.shapes)
        summed = gradients[0].new_empty((parts.world_size, parts.longest, features), dtype=dtype)
        pieces = [parts.split(x, 0) for x in gradients]
        for rank, count in enumerate(parts.lengths):
            summed[rank, count:] = 0
            for part, own in zip(_features(summed[rank, :count], ctx.shapes), pieces, strict=True):
                for place, x in zip(part.split([len(x) for x in own[rank]]), own[rank], strict=True):
                    place.copy_(x)
        with step("backward: reduce-scatter", ctx.where):
            found = sum_of_own(summed, ctx.group)
        own = _features(found[: ctx.shapes[0][0]], ctx.shapes)
        return None, None, None, *(x.to(gradient.dtype) for x, gradient in zip(own, gradients, strict=True))


def _all_gather(tensors: Sequence[Tensor], parts: Parts, group: Group) -> list[list[Tensor]]:
    """Each tensor (l, …) as the parts of all processes in turn; a part may have more rows than its process holds."""
    shapes = [x.shape[1:] for x in tensors]
    if tensors[0].device.type == GLOO_DEVICE:
        expected = [[(length, *shape) for shape in shapes] for length in parts.lengths]
        found = exchange([tensors] * parts.world_size, expected, group)
        return [list(found[index :: len(tensors)]) for index in range(len(tensors))]
    count = len(tensors[0])
    sent = tensors[0].new_zeros((parts.longest, sum(map(math.prod, shapes))))
    for place, x in zip(_features(sent[:count], [x.shape for x in tensors]), tensors, strict=True):
        place.copy_(x)
    ranks = from_every_rank(sent, group)  # (W, longest, features)
    return [list(each) for each in zip(*(_features(x, [x.shape for x in tensors]) for x in ranks), strict=True)]


def _features(rows: Tensor, shapes: Shapes) -> list[Tensor]:
    """Rows (n, features) as views (n, …) of each shape but for its first size."""
    sizes = [math.prod(shape[1:]) for shape in shapes]
    return [x.view(len(rows), *shape[1:]) for x, shape in zip(rows.split(sizes, 1), shapes, strict=True)]


def all_to_all(pieces: Pieces, shapes: Sequence[Shapes], group: Group) -> list[list[Tensor]]:
    """Exchange tensors of one dtype: ``pieces[r]`` go to process r, and what comes from it has the ``shapes[r]``.

    A process's own pieces come back as they are.
    """
    own = dist.get_rank(group)
    shapes = [*shapes[:own], [x.shape for x in pieces[own]], *shapes[own + 1 :]]
    sizes = [len(part) for part in pieces]
    found = iter(cast("tuple[Tensor, ...]", _AllToAll.apply(sizes, shapes, group, *chain(*pieces))))
    return [[next(found) for _ in part] for part in shapes]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sizes: list[int], shapes: Sequence[Shapes], group: Group, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        pieces = _grouped(flat, sizes)
        ctx.shapes, ctx.sizes, ctx.group = [[x.shape for x in part] for part in pieces], [len(x) for x in shapes], group
        with step("forward: all-to-all"):
            return exchange(pieces, shapes, group)

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        with step("backward: all-to-all"):
            return None, None, None, *exchange(_grouped(gradients, ctx.sizes), ctx.shapes, ctx.group)


def _grouped(flat: Sequence[Tensor], sizes: Sequence[int]) -> Pieces:
    found = iter(flat)
    return [[next(found) for _ in range(size)] for size in sizes]


def exchange(pieces: Pieces, shapes: Sequence[Shapes], group: Group) -> tuple[Tensor, ...]:
    """As `all_to_all`, without gradients: what came is cut without a copy, one tensor after the other."""
    own, like = dist.get_rank(group), next(chain(*pieces))
    sent = [*pieces[:own], (), *pieces[own + 1 :]]
    coming = [*shapes[:own], (), *shapes[own + 1 :]]
    # Each piece for another process is copied once, into what is sent.
    counts = [sum(x.numel() for x in part) for part in sent]
    expected = [sum(math.prod(shape) for shape in part) for part in coming]
    leaving, found = like.new_empty(sum(counts)), like.new_empty(sum(expected))
    for place, x in zip(_cut(leaving, [[x.shape for x in part] for part in sent]), chain(*sent), strict=True):
        place.copy_(x)
    dist.all_to_all_single(found, leaving, expected, counts, group=group)
    arrived, before = _cut(found, coming), sum(map(len, shapes[:own]))
    return *arrived[:before], *pieces[own], *arrived[before:]


def _cut(flat: Tensor, shapes: Sequence[Shapes]) -> tuple[Tensor, ...]:
    each = list(chain(*shapes))
    return tuple(x.view(shape) for x, shape in zip(flat.split([*map(math.prod, each)]), each, strict=True))


def sum_of_gradients(x: Tensor, group: Group, where: str) -> Tensor:
    """The tensor itself, which every process holds alike; its gradient is summed over them."""
    return cast(Tensor, _SumOfGradients.apply(x, group, where)) if x.requires_grad and torch.is_grad_enabled() else x


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, where: str) -> Tensor:
        ctx.group, ctx.where = group, where
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        summed = gradient.to(sum_dtype(gradient), copy=True, memory_format=torch.contiguous_format)
        with step("backward: all-reduce of a bias's gradient", ctx.where):
            dist.all_reduce(summed, group=ctx.group)
        return summed.to(gradient.dtype), None, None


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """The largest over all processes, number by number. Without gradients."""
    found = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


def sum_dtype(x: Tensor) -> torch.dtype:
    """In which tensors of this dtype are summed."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
