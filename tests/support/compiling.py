"""Decoding with a compiled step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter


@torch.no_grad()
def compiled_steps(
    step: Callable[[Tensor], Tensor], x: Tensor, prompt: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, list[int]]:
    """Three tokens at once, then one by one compiled: the outputs, and how often it was compiled after each step."""
    torch._dynamo.reset()
    counter, counts = CompileCounter(), list[int]()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    result = [(prompt or step)(x[:, :3])]
    for n in range(3, x.shape[1]):
        result.append(compiled(x[:, [n]]))
        counts.append(counter.frame_count)
    return torch.cat(result, 1), counts
