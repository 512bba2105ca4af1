"""After `tensor_parallel`, the processes compare their inputs before a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._environment import is_tracing
from .._multihead import MultiHeadAttention
from ..transformer import FeedForward, SwiGLU
from ._agreement import agree, fingerprint, not_pickled, require_equal
from ._finding import attention_parts
from ._tensor_hooks import WHERE

_STATE = "state of PyTorch's generator"


class SameInputs:
    """A hook before each call. It compares sizes and dtypes if they differ from those of the call before.

    gloo ends a process that sums tensors of different sizes. Before the first training call with dropout of features
    that every process holds, it also compares the states of the generators, because the outputs would differ.

    Args:
        mesh: the mesh of the processes.
        agreements: a group of the same processes, used for agreements only.
    """

    def __init__(self, mesh: DeviceMesh, agreements: dist.ProcessGroup) -> None:
        self._mesh, self._agreements = mesh, agreements
        self._agreed_inputs: dict[str, int] | None = None
        self._agreed_state = False

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if is_tracing():
            return
        draws = not self._agreed_state and module.training and _drops_whole(module)
        facts = _sizes([*inputs, *keywords.values()])
        if not draws and (facts == self._agreed_inputs or _compares_itself(module)):
            return
        kind = self._mesh.device_type
        get_state = torch.get_rng_state if kind == "cpu" else torch.get_device_module(kind).get_rng_state
        state = {_STATE: fingerprint(get_state().tolist()) if draws else 0}
        gathered = agree(WHERE, self._agreements, kind, {**facts, **state})
        require_equal(WHERE, gathered, tuple(facts), "Give every process the same input.")
        fix = "Features that all of them hold are dropped alike: call torch.manual_seed with one seed in all of them."
        require_equal(f"{WHERE}: dropout", gathered, tuple(state), fix)
        self._agreed_inputs, self._agreed_state = facts, self._agreed_state or draws

    def __deepcopy__(self, memo: object) -> SameInputs:
        return SameInputs(self._mesh, self._agreements)

    def __reduce__(self) -> str:
        raise not_pickled(WHERE)


def _sizes(inputs: Sequence[object]) -> dict[str, int]:
    """Sizes and dtypes of the first two tensors of a call: query and key, or the input and the memory of a decoder."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    named = zip_longest(("query", "key"), tensors[:2])
    return {f"{what} of the {name}": size for name, x in named for what, size in _sizes_of(x).items()}


def _sizes_of(x: Tensor | None) -> dict[str, int]:
    dims = batch = length = features = dtype = 0
    if x is not None:
        rows = x.values() if x.layout is torch.jagged else x
        dims, dtype = x.dim(), fingerprint(str(x.dtype))
        if x.is_nested:
            batch = x.size(0)
        elif dims >= 2:
            batch = math.prod(x.shape[:-2])
        if rows.dim() >= 2 and not rows.is_nested:
            length, features = rows.shape[-2:]
    return {"dimensions": dims, "batch size": batch, "length": length, "features": features, "dtype": dtype}


def _compares_itself(module: nn.Module) -> bool:
    """Whether `context_parallel` has split the module too. Its calls then agree on more than this."""
    return any(each.sequence_shard is not None for each in module.modules() if isinstance(each, MultiHeadAttention))


def _drops_whole(module: nn.Module) -> bool:
    """Whether dropout acts on features that every process holds. Hidden features of feed-forward parts are split."""
    _, others = attention_parts(WHERE, module)
    whole = (part for _, part in others if not isinstance(part, FeedForward | SwiGLU))
    return any(isinstance(each, nn.Dropout) and each.p > 0 for part in whole for each in part.modules())
