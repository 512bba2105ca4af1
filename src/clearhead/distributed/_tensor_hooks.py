"""Tensors enter a part of a split module as `DTensor`s, and leave it as plain tensors of this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from .._environment import is_tracing
from ._collectives import step, sum_dtype

WHERE = "tensor_parallel"


def distribute(name: str, owner: nn.Module, key: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a parameter of a module by a `DTensor`."""
    parameter = getattr(owner, key)
    replacement = nn.Parameter(
        distribute_tensor(parameter.detach(), mesh, [placement]), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad and placement.is_replicate():
        replacement.register_post_accumulate_grad_hook(partial(_sum_gradient, name))
    owner.register_parameter(key, replacement)


def _sum_gradient(name: str, parameter: Tensor) -> None:
    """Sum the gradient of a replicated parameter over the processes, if each process has a part of the sum."""
    gradient, placements = cast(Any, parameter.grad), cast(Any, parameter).placements
    if gradient is not None and gradient.placements != placements:
        with step(f"backward: all-reduce of the gradient of {name}", WHERE):
            summed = gradient.to(sum_dtype(gradient)).redistribute(placements=placements)
            parameter.grad = summed.to(gradient.dtype)


def split_linear(
    module: nn.Module, mesh: DeviceMesh, placement: Placement, name: str, leave: Callable[[Any], Tensor]
) -> None:
    """Let a linear layer compute with `DTensor`s: its input is placed, and `leave` makes its output a plain tensor."""
    _hook(module, lambda x: _as_rows(placed(mesh, placement, name, x)), leave)


def split_norm(module: nn.Module, mesh: DeviceMesh, placement: Placement, name: str) -> None:
    """Let a norm compute with `DTensor`s of one placement."""
    _hook(module, partial(placed, mesh, placement, name), whole_output if placement.is_replicate() else local)


def _hook(module: nn.Module, enter: Callable[[Tensor], Tensor], leave: Callable[[Any], Tensor]) -> None:
    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        result = leave(output)
        leading = getattr(inputs[0], "_leading", None)
        return result if leading is None else result.view(*leading, result.shape[-1])

    _hook_input(module, enter)
    module.register_forward_hook(after)


def _hook_input(module: nn.Module, enter: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_pre_hook(lambda module, inputs: (enter(inputs[0]), *inputs[1:]))


def share_input(module: nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Let several projections share one input, so that its gradient is summed once."""
    _hook_input(module, partial(placed, mesh, Replicate(), name))


def _as_rows(x: Tensor) -> Tensor:
    """The input of a linear layer. An empty input (B, 0, E) becomes (0, E).

    A linear layer views an input of more dimensions as rows and back. `DTensor`'s rules for views divide by sizes and
    compare products of sizes: with a size of zero they raise, or never end.
    """
    leading = x.shape[:-1]
    if len(leading) < 2 or 0 not in leading:
        return x
    empty = leading.index(0)
    rows = x.sum([dim for dim in range(len(leading)) if dim != empty])  # no view, also in its gradient
    rows._leading = leading  # pyright: ignore[reportAttributeAccessIssue] # for the hook that restores the shape
    return rows


def placed(mesh: DeviceMesh, placement: Placement, name: str, x: Tensor) -> Tensor:
    """The input of a part as a `DTensor`. The gradient of a replicated input is summed over the processes."""
    if isinstance(x, DTensor):
        return x
    tensor = DTensor.from_local(x, mesh, [placement], run_check=False)
    if placement.is_replicate() and tensor.requires_grad and not is_tracing():
        # `from_local` also sums it, as it does in a graph, but its error would not name the step.
        tensor.register_hook(partial(_summed_input_gradient, name))
    return tensor


def _summed_input_gradient(name: str, gradient: Any) -> Tensor:
    with step(f"backward: all-reduce of the gradient of the input of {name}", WHERE):
        return gradient.redistribute(placements=[Replicate()])


def local(x: Tensor) -> Tensor:
    """The part of a `DTensor` that this process holds; a plain tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def split_output(output: Any) -> Tensor:
    """The features of this process, of a projection that is split column-wise."""
    return output.redistribute(placements=[Shard(-1)]).to_local()


def features_of_output(features: slice, output: Any) -> Tensor:
    """Some features of a replicated projection. The gradient of each process is a part of the sum."""
    return output.to_local(grad_placements=[Partial()])[..., features]


def summed_output(name: str, output: Any) -> Tensor:
    """The output of a projection that is split row-wise."""
    with step(f"forward: all-reduce of the output of {name}", WHERE):
        return whole_output(output.redistribute(placements=[Replicate()]))


def whole_output(output: Any) -> Tensor:
    """A replicated output. It is no view, because `fully_shard` warns if a module returns a view."""
    return output.to_local().clone()
