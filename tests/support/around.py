"""What may surround a call of attention: a module, dispatch modes, tracing, subclasses of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead

__all__ = ["Seeing", "Subclass", "through_module", "tracing"]


class Subclass(Tensor):
    """A subclass of tensors without behaviour of its own."""


class Seeing(TorchDispatchMode):
    """Notes the memory that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor):
                self.made.add(each.untyped_storage().data_ptr())
        return found


@contextmanager
def tracing() -> Iterator[None]:
    """As while a graph is recorded, without recording one."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before  # type: ignore[attr-defined]


def through_module(request: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A module whose projections are identities."""
    inner, kv_inner = request.heads * request.dim, request.kv_heads * request.dim
    module = clearhead.MultiHeadAttention(
        inner, request.heads, num_kv_heads=request.kv_heads, kdim=kv_inner, vdim=kv_inner, bias=False,
        scale=request.scale, softcap=request.softcap, dtype=request.dtype,
    ).requires_grad_(False)  # fmt: skip
    for projection in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        nn.init.eye_(projection.weight)
    if request.sinks:
        vars(module)["_parameters"]["sinks"] = request.leaves["sinks"]
    average = request.weights == "average"
    with torch.no_grad() if request.around == "no_grad" else nullcontext():
        output, weights = module(
            *(clearhead.merge_heads(x) for x in (query, key, value)),
            mask=request.shown.mask, need_weights=True, average_attn_weights=average,
        )  # fmt: skip
    return clearhead.split_heads(output, request.heads), weights
