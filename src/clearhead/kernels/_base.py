"""What every kernel is: a name, its reasons against a call, and the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .._call.spec import AttentionCall

__all__ = ["UNMASKED", "FlatAttention", "Kernel", "Masks", "Plan", "Refusal", "rows_interleave"]


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


Plan = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # of query, key, value and the mask, if there is one
Masks = tuple[Tensor | None, Tensor | None]  # marks of what is visible, and numbers to add
UNMASKED: Masks = (None, None)


def rows_interleave(tensor: Tensor) -> bool:
    """Whether `torch.empty_like` lays rows out with gaps between their elements.

    It does for tensors that overlap themselves, such as those of `Tensor.unfold`, whose rows are contiguous. Kernels
    that allocate results or gradients with it would write elsewhere than they were told.
    """
    if 1 not in tensor.stride()[:-1] or tensor.shape[-1] == 1:
        return False
    return torch.empty_like(tensor, device="meta").stride(-1) != 1


class FlatAttention(Protocol):
    """Attention of projections that are not cut into heads, without autograd: each pass is called by hand."""

    def empty_lse(self, like: Tensor) -> Tensor:
        """(B, H, L) for the log-sum-exp."""
        ...

    def forward(
        self, tensors: tuple[Tensor, ...], lse: Tensor | None = None, masks: Masks = UNMASKED
    ) -> tuple[Tensor, bool]:
        """(B·L, H·D), and whether masks hide anybody altogether, whose rows in `tensors` are then set to zero.

        The log-sum-exp is written to `lse` where it is given.
        """
        ...

    def forward_with_weights(
        self, tensors: tuple[Tensor, ...], lse: Tensor | None, average: bool
    ) -> tuple[Tensor, Tensor]:
        """(B·L, H·D), and weights (B, H, L, S), or their mean over heads (B, L, S), where masks have no tensors."""
        ...

    def backward(
        self,
        tensors: tuple[Tensor, ...],
        output: Tensor,
        lse: Tensor,
        gradient: Tensor,
        masks: Masks = UNMASKED,
        hides: bool = False,
    ) -> tuple[Tensor, ...]:
        """Gradients of `tensors`, from that of the output, and what the forward pass has said of masks."""
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

    def reservations(self, call: AttentionCall) -> tuple[Refusal, ...]:
        """Reasons to leave a call that the kernel can run to the next one, unless `use_kernel` forces this one."""
        return ()

    @abstractmethod
    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute the output (B, H, L, Dv) and, if the call wants it, the log-sum-exp (B, H, L)."""

    def prepare(self, call: AttentionCall) -> Plan:
        """The computation for calls that differ from this one in the numbers in query, key and value alone.

        The mask that it is given is this call's, and need not be looked at.
        """
        template = call.without_tensors()
        return lambda query, key, value, _mask: self.run(replace(template, query=query, key=key, value=value))[0]

    def prepare_masked(self, call: AttentionCall) -> Plan | None:
        """The same for masks of the kind of this call's, whose tensors differ too; ``None`` if it cannot.

        What they hide from everybody is set to zero here.
        """
        return None

    def prepare_flat(self, call: AttentionCall, projected: tuple[Tensor, ...]) -> FlatAttention | None:
        """The same on projections that are not cut into heads, as a part of a larger step; ``None`` if it cannot.

        Args:
            call: of (B, H, L, D) and twice (B, Hkv, S, D), with a mask of a known kind that is the same for all heads.
            projected: of which those are views: query, key and value, (B·L, H·D) and twice (B·S, Hkv·D), or the last
                two or all three side by side in one tensor; those of later calls lie alike.
        """
        return None
