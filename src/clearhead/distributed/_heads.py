"""How an attention module is called that holds some of the heads."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._environment import is_tracing
from ..masks._base import Mask
from ..masks._combined import And
from ..masks._grid import Offset
from ..masks._part import part_of
from ._agreement import agree, fingerprint, not_pickled, require_device, require_equal
from ._collectives import step, sum_of_gradients
from ._statistics import with_all_heads
from ._tensor_hooks import WHERE, local, placed


@dataclass(frozen=True)
class LocalHeads:
    """The `HeadShard` of one process.

    Args:
        name: the name of the module, for messages.
        mesh: the mesh of the processes that share the heads.
        total, all_num_kv_heads: H and Hkv of the module.
        first: the first head of this process.
        num_heads, num_kv_heads: how many heads this process has.
    """

    name: str
    mesh: DeviceMesh
    total: int
    all_num_kv_heads: int
    first: int
    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def enter(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        # One DTensor for one tensor: gradients of the projections are added before they are summed over processes.
        entered: dict[int, Tensor] = {}
        for x in inputs:
            if x is not None and id(x) not in entered:
                require_device(WHERE, "query", x, self.mesh.device_type)
                entered[id(x)] = placed(self.mesh, Replicate(), self.name, x)
        return tuple(None if x is None else entered[id(x)] for x in inputs)

    def local(self, parameter: Tensor) -> Tensor:
        return local(parameter)

    def mask(self, mask: Mask | None) -> Mask | None:
        if isinstance(mask, And):
            return And(tuple(map(self._local_mask, mask.parts())))
        return None if mask is None else self._local_mask(mask)

    def all_weights(self, weights: Tensor) -> Tensor:
        if not is_tracing():
            # The all-reduce of averages would meet the all-reduce of outputs of a process that returns no weights.
            self._agree("weights", tuple(weights.shape), None, "Ask for weights in every process alike.")
        placement: Placement = Shard(1)
        if weights.dim() == 3:
            weights, placement = weights / self.mesh.size(), Partial()
        split = DTensor.from_local(weights, self.mesh, [placement], run_check=False)
        with step(f"forward: exchange of the weights of {self.name}", WHERE):
            return split.redistribute(placements=[Replicate()]).to_local()

    def agree(self, wanted: Hashable, problem: Exception | None) -> None:
        self._agree("recorders", wanted, problem, "Record in every process alike.")

    def _agree(self, what: str, wanted: Hashable, problem: Exception | None, fix: str) -> None:
        where = f"{WHERE}: {what} of {self.name}"
        gathered = agree(where, self.group, self.mesh.device_type, problem or {what: fingerprint(wanted)})
        require_equal(WHERE, gathered, (what,), fix)

    def all_heads(self, results: dict[str, Any]) -> dict[str, Any]:
        return with_all_heads(results, self.group, lambda name, tensor, rank: tensor, WHERE)

    def _local_mask(self, mask: Mask) -> Mask:
        """A mask without `&`, for the heads of this process."""
        biases = mask.bias_tensors()
        if any(isinstance(tensor, DTensor) for tensor in biases):
            return mask.with_bias_tensors(map(local, biases))
        if any(tensor.requires_grad for tensor in biases):
            group = self.group
            mask = mask.with_bias_tensors(sum_of_gradients(tensor, group, WHERE) for tensor in biases)
        return cast(Mask, part_of(mask, Offset(self.total, self.first)))

    def __deepcopy__(self, memo: object) -> LocalHeads:
        return self

    def __reduce__(self) -> str:
        raise not_pickled(WHERE)
