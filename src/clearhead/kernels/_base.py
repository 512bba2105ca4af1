"""What every kernel is: a name, its refusals of a call, and the plans it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from .._call.call import AttentionCall, Results
from .._call.spec import AttentionSpec
from ..masks._base import Mask
from ..masks._grid import Grid
from ..masks._lowering import differs_between_heads

#: How calls of one spec are computed.
Plan = Callable[[AttentionCall], Results]


class Refusal:
    """One reason why a kernel cannot run a call.

    The text is put together only when it is read: formatting a symbolic length while tracing would tie the graph
    to that length.

    Args:
        template: the reason, with fields for values as in `str.format`.
        values: of these fields.

    Example:
        >>> from clearhead.kernels import Refusal
        >>> str(Refusal("it computes in float32, and the tensors are {dtype}", dtype="float64"))
        'it computes in float32, and the tensors are float64'
    """

    def __init__(self, template: str, **values: object) -> None:
        self._template = template
        self._values = values

    def __str__(self) -> str:
        return self._template.format(**self._values)


class Kernel(ABC):
    """One way to compute attention.

    A kernel reads the spec of a call, and the structure of its mask on the grid, to refuse or to plan it. The plan
    receives the operands.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 2, 3, 4)
        >>> {name: [str(refusal) for refusal in found] for name, found in clearhead.explain(x, x, x).reasons.items()
        ...  if name == "reference"}
        {'reference': []}
    """

    name: ClassVar[str]
    #: False for fused kernels whose backward cannot be differentiated again; the plan then sees to that.
    twice_differentiable: ClassVar[bool]
    #: True where every spec is compiled first, so that trying one takes seconds.
    compiles: ClassVar[bool] = False
    #: Whether NaN in fully masked queries, or in keys masked for every query, stays out of all results by itself.
    isolates_hidden: ClassVar[bool] = False
    #: Whether NaN in a fully masked query stays out of the output by itself; its gradients may not.
    isolates_queries: ClassVar[bool] = False
    #: Whether one plan computes all packed sequences of a call (`Request.rows`).
    takes_packed: ClassVar[bool] = False
    #: Whether dropout is drawn from the seed of the call, so that such kernels drop the same weights.
    seeds_dropout: ClassVar[bool] = True

    @abstractmethod
    def refusals(self, spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
        """Every reason against calls of this spec; empty if the kernel can run them."""

    def reservations(self, spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
        """Reasons to leave calls that the kernel can run to the next one, unless `use_kernel` forces this one."""
        return ()

    @abstractmethod
    def plan(self, spec: AttentionSpec, mask: Mask | None, grid: Grid) -> Plan:
        """The computation of calls of this spec, with masks of this one's signature.

        It returns the output (B, H, L, Dv), the log-sum-exp (B, H, L) if the spec wants it, and weights if the spec
        wants them and `gives_weights` says so.
        """

    def weights_refusals(self, spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
        """Every reason against weights of calls that it can run; read where `use_kernel` forces this kernel.

        Elsewhere weights that do not come with the output are computed in a pass of their own.
        """
        return (Refusal("it gives no weights"),)

    def gives_weights(self, spec: AttentionSpec, mask: Mask | None, grid: Grid) -> bool:
        """Whether output and weights come from one pass."""
        return False


def applicable(reasons: dict[str, bool]) -> list[Refusal]:
    """A refusal for each reason that applies."""
    return [Refusal(reason) for reason, applies in reasons.items() if applies]


def refusals_of_heads(mask: Mask, grid: Grid) -> list[Refusal]:
    """Against a mask whose lowering would be as large as the scores."""
    differs = mask.lowered(grid, "differs between heads", lambda: differs_between_heads(mask, grid))
    return applicable({"the mask differs between heads and would have to be built whole, (B, H, L, S)": differs})


def refusals_of_half(spec: AttentionSpec) -> list[Refusal]:
    """Against half precision in kernels of PyTorch's on the CPU."""
    half = spec.device.type == "cpu" and spec.dtype in (torch.bfloat16, torch.float16)
    return applicable({"on the CPU it rounds weights to half precision, which can more than double the error": half})


def rows_interleave(tensor: Tensor) -> bool:
    """Whether `torch.empty_like` lays rows out with gaps between their elements.

    It does for tensors that overlap themselves, such as those of `Tensor.unfold`, whose rows are contiguous. Kernels
    that allocate results or gradients with it would write elsewhere than expected.
    """
    if 1 not in tensor.stride()[:-1] or tensor.shape[-1] == 1:
        return False
    return torch.empty_like(tensor, device="meta").stride(-1) != 1
