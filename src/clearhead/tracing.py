"""Whether the code is being traced (`torch.compile`, `torch.export`) rather than run on values."""

from __future__ import annotations

import torch

__all__ = ["is_tracing"]


def is_tracing() -> bool:
    """True while a graph is being recorded: values cannot be looked at, sizes must stay symbolic."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
