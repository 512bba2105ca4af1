"""Differentiable collectives on parts of unequal length, made of the public ones of `torch.distributed`.

Every gradient is that of the sum of what all processes compute: a tensor that went to several of them gets the sum of
their gradients. float16 and bfloat16 gradients are summed in float32, as one process accumulates them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._environment import all_gather_single, reduce_scatter_single
from ..errors import ClearheadError, DistributedError

Group = dist.ProcessGroup


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


def from_every_rank(x: Tensor, group: Group) -> Tensor:
    """The tensors of all processes, which have one shape: (W, *shape). Without gradients."""
    found = x.new_empty((dist.get_world_size(group), *x.shape))
    all_gather_single(found, x.contiguous()[None], group=group)
    return found


def gather_rows(x: Tensor, rows: int, group: Group) -> Tensor:
    """The tensors (n, …) of all processes, n ≤ rows, each filled up to `rows`: (W, rows, …).

    The gradient is summed over all processes.
    """
    return cast(Tensor, _GatherRows.apply(x, rows, group))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: Group) -> Tensor:
        ctx.count, ctx.group = x.shape[0], group
        with step("forward: all-gather"):
            return from_every_rank(filled(x, rows), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        summed = gradient.to(sum_dtype(gradient)).contiguous()
        found = summed.new_empty((1, *summed.shape[1:]))
        with step("backward: reduce-scatter"):
            reduce_scatter_single(found, summed, group=ctx.group)
        return found[0, : ctx.count].to(gradient.dtype), None, None


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Exchange numbers (n,): the first ``sent[0]`` go to process 0, and so on; ``received[r]`` come from process r."""
    return cast(Tensor, _AllToAll.apply(x, list(sent), list(received), group))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        with step("forward: all-to-all"):
            return exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        with step("backward: all-to-all"):
            return exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """As `all_to_all`, without gradients."""
    found = x.new_empty(sum(received))
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found


def sum_of_gradients(x: Tensor, group: Group, where: str) -> Tensor:
    """The tensor itself, which every process holds alike; its gradient is summed over them."""
    return cast(Tensor, _SumOfGradients.apply(x, group, where)) if x.requires_grad and torch.is_grad_enabled() else x


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, where: str) -> Tensor:
        ctx.group, ctx.where = group, where
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
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


def filled(x: Tensor, rows: int) -> Tensor:
    """A tensor (n, …) with zeros up to `rows`: (rows, …)."""
    missing = rows - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def sum_dtype(x: Tensor) -> torch.dtype:
    """In which tensors of this dtype are summed."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
