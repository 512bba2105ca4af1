"""`clip_grad_norm_`: one norm of gradients that lie on several meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._checks import items, number, strided
from ..errors import ArgumentError
from ._collectives import step, sum_dtype
from ._heads import local

_WHERE = "clip_grad_norm_"


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`, where processes hold parts of them; in place.

    g ← g · min(1, max_norm / (‖g‖ + 10⁻⁶)), where g are the gradients of all parameters as one vector and ‖g‖ is its
    2-norm, as in `torch.nn.utils.clip_grad_norm_`. That function takes parameters of one mesh only. After
    `tensor_parallel` and `fully_shard` some parameters lie on both dimensions of a mesh, and others on one of them.

    The norm is that of one process. Each element of a `DTensor` counts once, whether it is split or replicated. A plain
    tensor also counts once, so its gradient has to be the same in every process, as after
    `torch.nn.parallel.DistributedDataParallel`. For each set of mesh dimensions over which gradients are split, the
    processes exchange one number per dimension.

    Args:
        parameters: of all parts of the model, of any shape, in the same order in every process. One without a gradient
            is left out, and one that is given twice counts once.
        max_norm: at least 0.

    Returns:
        The norm before scaling, a tensor () of float64, equal in every process. It is 0 without gradients.

    Raises:
        ArgumentError: for a `max_norm` that is negative or NaN, and for a gradient that is not summed over its mesh.
        DTypeError: if `parameters` holds anything but tensors.
        DistributedError: if the exchange fails.

    Example:
        >>> import torch
        >>> from clearhead.distributed import clip_grad_norm_
        >>> layer = torch.nn.Linear(3, 2)
        >>> layer(torch.randn(5, 3)).square().sum().backward()
        >>> norm = clip_grad_norm_(layer.parameters(), 1e-3)
        >>> bool(clip_grad_norm_(layer.parameters(), 1.0) < 1.01e-3)
        True
    """
    most = number("max_norm", max_norm, "a number of at least 0", lambda value: value >= 0)
    tensors = items("parameters", [parameters] if isinstance(parameters, Tensor) else parameters, "tensors")
    unique = dict.fromkeys(strided("parameters", x, "tensors") for x in tensors)
    gradients = [x.grad for x in unique if x.grad is not None]
    with torch.no_grad():
        norm = _norm(gradients)
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            shard = _local(gradient)
            shard.mul_(factor.to(shard.device))
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all, which the processes of each mesh add up."""
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    device = gradients[0].device if gradients else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        shard = _local(gradient)
        square = torch.linalg.vector_norm(shard, dtype=sum_dtype(shard)).to(total.device, total.dtype).square()
        groups = _groups_of(gradient)
        squares[groups] = squares.get(groups, torch.zeros_like(total)) + square
    for groups, square in squares.items():
        for group in groups:
            with step("the sum of squares of the gradients", _WHERE):
                dist.all_reduce(square, group=group)
        total += square
    return total.sqrt()


def _groups_of(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over which a gradient is split."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh, placements = gradient.device_mesh, gradient.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        expected, fix = "gradients that are summed over their mesh", "Call it after backward(), before the next one."
        raise ArgumentError("parameters", expected=expected, got=f"one with {gradient.placements}", fix=fix)
    return local(gradient)
