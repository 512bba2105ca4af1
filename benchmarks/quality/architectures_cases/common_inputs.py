"""What the inputs of several model types have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .modalities import token_ids
from .sizes import LENGTH

__all__ = ["Make", "ones", "text"]

#: The inputs of a model, from its configuration.
Make = Callable[[Any], dict[str, Any]]


def text(config: Any, length: int = LENGTH) -> Tensor:
    """Random ids (B, L)."""
    return next(token_ids(length)(config))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)
