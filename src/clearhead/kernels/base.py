"""What every kernel is: a name, its reasons against a call, and the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Protocol

from torch import Tensor

from ..call import AttentionCall

__all__ = ["FlatAttention", "Kernel", "Refusal"]


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


class FlatAttention(Protocol):
    """Attention of projections that are not cut into heads, without autograd: each pass is called by hand."""

    def empty_lse(self, like: Tensor) -> Tensor:
        """(B, H, L) for the log-sum-exp."""
        ...

    def forward(self, tensors: tuple[Tensor, ...], lse: Tensor | None = None) -> Tensor:
        """(B·L, H·D); the log-sum-exp is written to `lse` where it is given."""
        ...

    def backward(
        self, tensors: tuple[Tensor, ...], output: Tensor, lse: Tensor, gradient: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of `tensors`, from that of the output."""
        ...


class Kernel(ABC):
    """One way to compute an `AttentionCall`."""

    name: ClassVar[str]
    #: False for fused kernels whose backward cannot be differentiated again; `dispatch` then sees to that.
    twice_differentiable: ClassVar[bool]
    #: True where every kind of call is compiled first, so that trying one takes seconds.
    compiles: ClassVar[bool] = False

    @abstractmethod
    def refusals(self, call: AttentionCall) -> tuple[Refusal, ...]:
        """Every reason against this call; empty if the kernel can run it."""

    @abstractmethod
    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute the output (B, H, L, Dv) and, if the call wants it, the log-sum-exp (B, H, L)."""

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The computation for calls that differ from this one in the numbers in query, key and value alone."""
        template = call.without_tensors()
        return lambda query, key, value: self.run(replace(template, query=query, key=key, value=value))[0]

    def prepare_flat(self, call: AttentionCall, projected: tuple[Tensor, ...]) -> FlatAttention | None:
        """The same on projections that are not cut into heads, as a part of a larger step; ``None`` if it cannot.

        Args:
            call: self-attention.
            projected: query, key and value, (B·L, H·D) and (B·L, Hkv·D) twice, or one tensor that holds them side
                by side; those of later calls lie alike.
        """
        return None
