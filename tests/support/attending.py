"""One call of `clearhead.attention`, on a kernel that is forced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import clearhead


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *,
    kernel: str | None = None,
    seed: int | None = None,
    **options: Any,
) -> Any:
    """What `clearhead.attention` returns.

    Args:
        query, key, value, mask, options: of `clearhead.attention`.
        kernel: the kernel that is forced; ``None`` leaves the choice to the call.
        seed: of PyTorch's generator, set before the call; ``None`` leaves the generator as it is.
    """
    if seed is not None:
        torch.manual_seed(seed)
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        return clearhead.attention(query, key, value, mask, **options)
