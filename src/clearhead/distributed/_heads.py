"""How tensors enter and leave the parts of a module whose heads are split.

They enter as `DTensor`s, and leave as plain tensors of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from .._environment import is_tracing
from .._statistics.totals import Computed
from ..masks._base import Mask
from ..masks._combined import all_of
from ..masks._grid import Offset
from ..masks._part import part_of
from ._agreement import OfThisProcess, agree, fingerprint, require_device, require_equal
from ._collectives import step, sum_dtype
from ._statistics import with_all_heads

WHERE = "tensor_parallel"


@dataclass(frozen=True)
class LocalHeads(OfThisProcess):
    """The `HeadShard` of one process.

    Args:
        name: the name of the module, for messages.
        mesh: the mesh of the processes that share the heads.
        offset: where the heads of this process lie among those of the module.
        all_num_kv_heads: Hkv of the module.
        num_heads, num_kv_heads: how many heads this process has.
    """

    where: ClassVar[str] = WHERE

    name: str
    mesh: DeviceMesh
    offset: Offset
    all_num_kv_heads: int
    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def enter(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        # One DTensor for one tensor: gradients of the projections are added before they are summed over processes.
        replicated: dict[int, Tensor] = {}
        for x in inputs:
            if x is not None and id(x) not in replicated:
                require_device(WHERE, "query", x, self.mesh.device_type)
                replicated[id(x)] = placed(self.mesh, Replicate(), f"the input of {self.name}", x)
        return tuple(None if x is None else replicated[id(x)] for x in inputs)

    def local(self, parameter: Tensor) -> Tensor:
        return local(parameter)

    def mask(self, mask: Mask | None) -> Mask | None:
        return None if mask is None else all_of([self._local_mask(part) for part in mask.parts()])

    def all_weights(self, weights: Tensor) -> Tensor:
        if not is_tracing():
            # The all-reduce of averages would meet the all-reduce of outputs of a process that returns no weights.
            self._agree("weights", fingerprint(tuple(weights.shape)), "Ask for weights in every process alike.")
        placement: Placement = Shard(1)
        if weights.dim() == 3:
            weights, placement = weights / self.mesh.size(), Partial()
        split = DTensor.from_local(weights, self.mesh, [placement], run_check=False)
        with step(f"forward: exchange of the weights of {self.name}", WHERE):
            return split.redistribute(placements=[Replicate()]).to_local()

    def agree(self, wanted: Hashable, problem: Exception | None) -> None:
        self._agree("recorders", problem or fingerprint(wanted), "Record in every process alike.")

    def _agree(self, name: str, fact: int | Exception, fix: str) -> None:
        facts = fact if isinstance(fact, Exception) else {name: fact}
        gathered = agree(f"{WHERE}: {name} of {self.name}", self.group, self.mesh.device_type, facts)
        require_equal(WHERE, gathered, (name,), fix)

    def all_heads(self, computed: Computed) -> Computed:
        return with_all_heads(computed, self.group, lambda _, tensor, rank: tensor, WHERE)

    def _local_mask(self, mask: Mask) -> Mask | None:
        """A mask without `&`, for the heads of this process."""
        biases = mask.bias_tensors()
        if any(isinstance(tensor, DTensor) for tensor in biases):
            return mask.with_bias_tensors(map(local, biases))
        if any(tensor.requires_grad for tensor in biases):
            mask = mask.with_bias_tensors(map(self._with_summed_gradient, biases))
        return part_of(mask, self.offset)

    def _with_summed_gradient(self, bias: Tensor) -> Tensor:
        """The bias of all heads, whose gradient is summed over the processes, in float32 at least."""
        if not torch.is_grad_enabled():
            return bias
        replicated = placed(self.mesh, Replicate(), f"a bias of {self.name}", bias.to(sum_dtype(bias)))
        return replicated.to_local(grad_placements=[Partial()]).to(bias.dtype)


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

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        result = leave(output)
        leading = getattr(inputs[0], "_leading", None)
        return result if leading is None else result.view(*leading, result.shape[-1])

    place_input(module, lambda x: _as_matrix(placed(mesh, placement, f"the input of {name}", x)))
    module.register_forward_hook(after)


def split_norm(module: nn.Module, mesh: DeviceMesh, placement: Placement, name: str) -> None:
    """Let a norm compute with `DTensor`s of one placement."""

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        return replicated_output(output) if placement.is_replicate() else local(output)

    place_input(module, partial(placed, mesh, placement, f"the input of {name}"))
    module.register_forward_hook(after)


def place_input(module: nn.Module, place: Callable[[Tensor], Tensor]) -> None:
    """Replace the first input of each call. Projections that share it then sum its gradient once."""
    module.register_forward_pre_hook(lambda module, inputs: (place(inputs[0]), *inputs[1:]))


def _as_matrix(x: Tensor) -> Tensor:
    """The input of a linear layer. An empty input (B, 0, E) becomes (0, E).

    A linear layer views an input of more dimensions as a matrix and back. `DTensor`'s rules for views divide by sizes
    and compare products of sizes: with a size of zero they raise, or never end.
    """
    leading = x.shape[:-1]
    if len(leading) < 2 or 0 not in leading:
        return x
    empty = leading.index(0)
    matrix = x.sum([dim for dim in range(len(leading)) if dim != empty])  # no view, also in its gradient
    matrix._leading = leading  # pyright: ignore[reportAttributeAccessIssue] # for the hook that restores the shape
    return matrix


def placed(mesh: DeviceMesh, placement: Placement, name: str, x: Tensor) -> DTensor:
    """A tensor of this process as a `DTensor`. The gradient of a replicated tensor is summed over the processes."""
    if isinstance(x, DTensor):
        return x
    tensor = DTensor.from_local(x, mesh, [placement], run_check=False)
    if placement.is_replicate() and tensor.requires_grad and not is_tracing():
        # `from_local` also sums it, as it does in a graph, but its error would not name the step.
        tensor.register_hook(partial(_summed_gradient, name))
    return tensor


def _summed_gradient(name: str, gradient: Any) -> Tensor:
    with step(f"backward: all-reduce of the gradient of {name}", WHERE):
        return gradient.redistribute(placements=[Replicate()])


def local(x: Tensor) -> Tensor:
    """The shard of a `DTensor` that this process holds; a plain tensor itself."""
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
        return replicated_output(output.redistribute(placements=[Replicate()]))


def replicated_output(output: Any) -> Tensor:
    """A replicated output. It is no view, because `fully_shard` warns if a module returns a view."""
    return output.to_local().clone()
