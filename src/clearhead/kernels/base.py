"""What every kernel is: a name, its reasons against a call, and the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from ..call import AttentionCall

__all__ = ["Kernel", "Refusal"]


class Refusal:
    """One reason why a kernel cannot run a call.

    The text is put together only when it is read: formatting a symbolic length while tracing would tie the graph
    to that length.
    """

    def __init__(self, template: str, **values: object) -> None:
        self._template = template
        self._values = values

    def __str__(self) -> str:
        return self._template.format(**self._values)


class Kernel(ABC):
    """One way to compute an `AttentionCall`."""

    name: ClassVar[str]
    #: False for fused kernels whose backward PyTorch cannot differentiate again; `dispatch` then sees to that.
    twice_differentiable: ClassVar[bool]
    #: True where every kind of call is compiled first, so that trying one takes seconds.
    compiles: ClassVar[bool] = False

    @abstractmethod
    def refusals(self, call: AttentionCall) -> tuple[Refusal, ...]:
        """Every reason against this call; empty if the kernel can run it."""

    def faster_elsewhere(self, call: AttentionCall) -> str | None:
        """Name of the kernel that was measured to be faster at such a call, for where that one can run it."""
        return None

    @abstractmethod
    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute the output (B, H, L, Dv) and, if the call wants it, the log-sum-exp (B, H, L)."""

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The computation for calls that differ from this one in the numbers in query, key and value alone."""
        template = call.without_tensors()
        return lambda query, key, value: self.run(replace(template, query=query, key=key, value=value))[0]
