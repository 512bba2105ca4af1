"""Whether the code is being traced or transformed rather than simply run."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["is_dispatching", "is_tracing", "is_transformed"]


def is_tracing() -> bool:
    """True while a graph is being recorded (`torch.compile`, `torch.export`): sizes are symbolic, values unknown."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """True inside `torch.func` transforms and forward-mode derivatives, which only plain operations can follow."""
    if is_tracing():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # pyright: ignore


def is_dispatching() -> bool:
    """True where a `TorchDispatchMode` sees every operation (`make_fx`): what an extension computes it would miss."""
    return torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore
