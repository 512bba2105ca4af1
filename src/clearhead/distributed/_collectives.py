"""Differentiable collectives on shards of unequal length, made of the public collectives of `torch.distributed`.

A tensor that is sent to several processes gets the sum of their gradients. float16 and bfloat16 gradients are summed in
float32, as one process accumulates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._environment import is_tracing
from .._torch_private import all_gather_single, reduce_scatter_single
from ..errors import ClearheadError, DistributedError, KernelError
from ._layout import Shards

#: The function that splits sequences, for messages.
WHERE = "context_parallel"

Group = dist.ProcessGroup

#: The tensors that are sent to each process of a group.
Sent = Sequence[Sequence[Tensor]]
Shapes = Sequence[Sequence[int]]

#: Tensors of this device travel by gloo. Its all-gather copies to and from buffers of its own: for 16 MB between two
#: processes it takes three times as long as an all-to-all.
GLOO_DEVICE = "cpu"


@contextmanager
def step(name: str, where: str = WHERE) -> Generator[None, None, None]:
    """Name the step in which a collective fails. It fails within the group's time-out if a process has ended.

    Args:
        name: the name of the step.
        where: the function that split the module.

    Raises:
        DistributedError: if `torch.distributed` raises an error inside the block.
    """
    try:
        yield
    except ClearheadError:
        raise
    except RuntimeError as error:
        fix = "Another process has ended, or waits in another call; look at what it said first."
        raise DistributedError(f"{where}: {name}: the exchange failed. {fix} ({error})") from error


Backward = TypeVar("Backward", bound=Callable[..., "tuple[Tensor | None, ...]"])


def differentiable_once(backward: Backward) -> Backward:
    """Decorator of a backward pass. The gradients that it returns cannot be differentiated.

    With PyTorch's `once_differentiable` the returned gradients depend on the incoming gradients only:
    ``autograd.grad(…, allow_unused=True)`` then returns ``None`` for a second derivative that is not zero. Here the
    returned gradients depend on every tensor that the pass reads, so that a second derivative raises an error.

    Raises:
        KernelError: in the backward pass of the returned gradients.
    """

    @wraps(backward)
    def computed(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            returned = backward(ctx, *gradients)
        if is_tracing() or not torch.is_grad_enabled():  # graphs have no second derivatives
            return returned
        inputs = [x for x in (*gradients, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        where = getattr(ctx, "where", WHERE)
        return tuple(cast(Tensor, _Once.apply(where, x, *inputs)) if inputs and x is not None else x for x in returned)

    return cast(Any, computed)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, where: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.where = where
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise KernelError(
            f"{ctx.where}: second derivatives do not follow exchanges. "
            "Take them of a module that is not split, or of one after tensor_parallel alone."
        )


def from_every_rank(x: Tensor, group: Group) -> Tensor:
    """The tensors of all processes, which have one shape: (W, *shape). Without gradients."""
    gathered = x.new_empty((dist.get_world_size(group), *x.shape))
    all_gather_single(gathered, x.contiguous()[None], group=group)
    return gathered


def reduce_scatter_shards(tensors: Sequence[Tensor], shards: Shards, group: Group) -> list[Tensor]:
    """The shards (l, …) of this process of the sums of whole tensors (L, …) of all processes. Without gradients."""
    shapes = [x.shape for x in tensors]
    features = sum(math.prod(shape[1:]) for shape in shapes)
    sent = tensors[0].new_empty((shards.world_size, shards.longest, features), dtype=sum_dtype(tensors[0]))
    views = [shards.split(x, 0) for x in tensors]
    for rank, count in enumerate(shards.lengths):
        sent[rank, count:] = 0
        for target, intervals in zip(_features(sent[rank, :count], shapes), views, strict=True):
            torch.cat(intervals[rank], out=target)
    summed = torch.empty_like(sent[0])
    if sent.device.type == GLOO_DEVICE:  # a third of the time for a list
        dist.reduce_scatter(summed, list(sent), group=group)
    else:
        reduce_scatter_single(summed[None], sent, group=group)
    return _features(summed[: shards.lengths[dist.get_rank(group)]], shapes)


def gather_shards(tensors: Sequence[Tensor], shards: Shards, group: Group, where: str = WHERE) -> tuple[Tensor, ...]:
    """The whole sequences (L, …), from the shard (l, …) of each process: one all-gather of tensors of one dtype.

    On gloo it is one all-to-all. One reduce-scatter sums the gradients over all processes.
    """
    return cast("tuple[Tensor, ...]", _GatherShards.apply(shards, group, where, *tensors))


class _GatherShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, group: Group, where: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.group, ctx.where = shards, group, where
        with step("forward: all-gather", where):
            return tuple(shards.join(gathered, 0) for gathered in _all_gather(tensors, shards, group))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with step("backward: reduce-scatter", ctx.where):
            summed = reduce_scatter_shards(gradients, ctx.shards, ctx.group)
        return None, None, None, *(x.to(gradient.dtype) for x, gradient in zip(summed, gradients, strict=True))


def _all_gather(tensors: Sequence[Tensor], shards: Shards, group: Group) -> list[list[Tensor]]:
    """For each tensor (l, …) the shards of all processes. A shard may be padded at its end."""
    shapes = [x.shape[1:] for x in tensors]
    if tensors[0].device.type == GLOO_DEVICE:
        expected = [[(length, *shape) for shape in shapes] for length in shards.lengths]
        received = exchange([tensors] * shards.world_size, expected, group)
        return [list(received[index :: len(tensors)]) for index in range(len(tensors))]
    count = len(tensors[0])
    sent = tensors[0].new_zeros((shards.longest, sum(map(math.prod, shapes))))
    for target, x in zip(_features(sent[:count], [x.shape for x in tensors]), tensors, strict=True):
        target.copy_(x)
    ranks = from_every_rank(sent, group)  # (W, longest, features)
    return [list(gathered) for gathered in zip(*(_features(x, [x.shape for x in tensors]) for x in ranks), strict=True)]


def _features(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """A tensor (n, features) as views (n, …), one for each shape, whose first size is ignored."""
    sizes = [math.prod(shape[1:]) for shape in shapes]
    return [x.view(len(flat), *shape[1:]) for x, shape in zip(flat.split(sizes, 1), shapes, strict=True)]


def all_to_all(sent: Sent, shapes: Sequence[Shapes], group: Group) -> list[list[Tensor]]:
    """Exchange tensors of one dtype: ``sent[r]`` go to process r, whose tensors have the ``shapes[r]``.

    The tensors that a process sends to itself are returned as they are.
    """
    rank = dist.get_rank(group)
    shapes = [*shapes[:rank], [x.shape for x in sent[rank]], *shapes[rank + 1 :]]
    counts = [len(tensors) for tensors in sent]
    received = cast("tuple[Tensor, ...]", _AllToAll.apply(counts, shapes, group, *chain(*sent)))
    return _grouped(received, [*map(len, shapes)])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, counts: list[int], shapes: Sequence[Shapes], group: Group, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        sent = _grouped(flat, counts)
        ctx.group, ctx.counts = group, [*map(len, shapes)]
        ctx.shapes = [[x.shape for x in tensors] for tensors in sent]
        with step("forward: all-to-all"):
            return exchange(sent, shapes, group)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with step("backward: all-to-all"):
            return None, None, None, *exchange(_grouped(gradients, ctx.counts), ctx.shapes, ctx.group)


def _grouped(flat: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    tensors = iter(flat)
    return [[next(tensors) for _ in range(count)] for count in counts]


def exchange(sent: Sent, shapes: Sequence[Shapes], group: Group) -> tuple[Tensor, ...]:
    """As `all_to_all`, without gradients: one tuple of all tensors, cut from one buffer without a copy."""
    rank, like = dist.get_rank(group), next(chain(*sent))
    outgoing = [*sent[:rank], (), *sent[rank + 1 :]]
    incoming = [*shapes[:rank], (), *shapes[rank + 1 :]]
    # Each tensor for another process is copied once, into the buffer that is sent.
    counts = [sum(x.numel() for x in tensors) for tensors in outgoing]
    expected = [sum(map(math.prod, rank_shapes)) for rank_shapes in incoming]
    buffer, received = like.new_empty(sum(counts)), like.new_empty(sum(expected))
    for target, x in zip(_cut(buffer, [x.shape for x in chain(*outgoing)]), chain(*outgoing), strict=True):
        target.copy_(x)
    dist.all_to_all_single(received, buffer, expected, counts, group=group)
    tensors, before = _cut(received, [*chain(*incoming)]), sum(map(len, shapes[:rank]))
    return *tensors[:before], *sent[rank], *tensors[before:]


def _cut(flat: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    return tuple(x.view(shape) for x, shape in zip(flat.split([*map(math.prod, shapes)]), shapes, strict=True))


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which tensors of this dtype are summed."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
