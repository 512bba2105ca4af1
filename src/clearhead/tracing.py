"""Whether the code is being traced or transformed rather than simply run."""

from __future__ import annotations

import torch

__all__ = ["is_tracing", "is_transformed"]


def is_tracing() -> bool:
    """True while a graph is being recorded (`torch.compile`, `torch.export`): sizes are symbolic, values unknown."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """True inside `torch.func` transforms (vmap, grad, jacrev, …), which plain tensor operations alone can follow."""
    return not is_tracing() and torch._C._are_functorch_transforms_active()  # pyright: ignore
