"""Which operations a piece of code issues, forward and backward, and how much memory each asks for."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """Inside the ``with`` block, remembers the largest storage that any operation returned, and which one it was.

    Storages are measured and not shapes: an expanded view is as small as what it looks at.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known and storage.nbytes() > self.largest:
                    self.largest, self.operation = storage.nbytes(), str(func)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        assert self.largest > 0, "nothing was measured"


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
