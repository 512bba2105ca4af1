"""Counting the operations that a piece of code issues."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """The names of ATen's operations, and how many of them read a value back to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def values_read(self) -> int:
        return sum("_local_scalar_dense" in name or "equal." in name for name in self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
