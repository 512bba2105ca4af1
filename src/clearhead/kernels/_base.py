"""The base class of kernels: each has a name, refuses calls with reasons, and plans the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._call.call import Call, Results
from .._call.layout import FORMULA, Layout
from ..masks._bound import BoundMask
from ..masks._grid import take
from ..masks._structure import joined

#: Parts of the formula whose names in messages are others.
_PARTS = {"softcap": "soft-cap", "row_sinks": "sinks of single queries"}
#: The computation of all calls of one layout.
Plan = Callable[[Call], Results]


class Refusal:
    """One reason why a kernel cannot run a call.

    The text is formatted only on reading. While tracing, formatting a symbolic length would tie the graph to it.

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


class Backend(NamedTuple):
    """The kernel of a library that computes a call.

    Args:
        name: of the kernel.
        faster: what would have to change for a faster one.
    """

    name: str
    faster: tuple[str, ...] = ()


class Kernel(ABC):
    """One way to compute attention.

    A kernel reads the layout of a call, and the structure of its mask on the grid, to refuse or to plan it. The plan
    receives the operands.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 2, 3, 4)
        >>> {name: list(reasons) for name, reasons in clearhead.explain(x, x, x).reasons.items()
        ...  if name == "reference"}
        {'reference': []}
    """

    name: ClassVar[str]
    #: False for fused kernels whose backward PyTorch cannot differentiate again. The plan then adds second derivatives.
    twice_differentiable: ClassVar[bool]
    #: True where every layout is compiled first, so that trying one takes seconds.
    compiles: ClassVar[bool] = False
    #: Whether NaN in fully masked queries, or in keys masked for every query, stays out of all results by itself.
    isolates_hidden: ClassVar[bool] = False
    #: Whether NaN in a fully masked query stays out of the output by itself; its gradients may not.
    isolates_queries: ClassVar[bool] = False
    #: Whether one plan computes all packed sequences of a call (`Call.sequences`).
    takes_packed: ClassVar[bool] = False
    #: The optional parts of the formula that it computes (`FORMULA`).
    formula: ClassVar[frozenset[str]] = frozenset()
    #: Whether its plans serve every number of keys and every band, and whether it runs a call does not depend on them.
    fits_all_sizes: ClassVar[bool] = False
    #: Whether it takes merged operands (`Call.heads`), and gives a merged output. Others get them with heads.
    takes_merged: ClassVar[bool] = False
    #: Whether dropout is drawn from the seed of the call, so that such kernels drop the same weights.
    seeds_dropout: ClassVar[bool] = True

    @abstractmethod
    def refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        """Every reason against calls of this layout; empty if the kernel can run them."""

    @abstractmethod
    def plan(self, layout: Layout, bound: BoundMask) -> Plan:
        """The computation of calls of this layout, with masks whose layout is this one's.

        It returns the output (B, H, L, Dv). It also returns the log-sum-exp (B, H, L) if `layout.lse` is set, and
        weights if `layout.weights` is set and `gives_weights` is true.
        """

    def weights_refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        """Every reason against weights of supported calls, where `use_kernel` forces this kernel.

        Without `use_kernel`, a separate pass computes weights that do not come with the output.
        """
        return (Refusal("it gives no weights"),)

    def backend(self, layout: Layout, bound: BoundMask) -> Backend | None:
        """Which kernel of PyTorch computes a supported call on a GPU. ``None`` for Clearhead's own."""
        return None

    def gives_weights(self, layout: Layout, bound: BoundMask) -> bool:
        """Whether output and weights come from one pass."""
        return False


def cut(fields: NamedTuple, dims: dict[str, int], index: Tensor | slice) -> dict[str, Any]:
    """The fields with these names, indexed along a dimension. Fields that are ``None`` are left out."""
    return {
        name: take(tensor, dim, index) for name, dim in dims.items() if (tensor := getattr(fields, name)) is not None
    }


def rows_of_mask(fields: Any, rows: Tensor, shape: tuple[int, int]) -> dict[str, Any]:
    """The fields of a lowered mask for chosen rows of a call with this L and S, in any order.

    They need not be neighbours, so a band becomes a range of columns per row.
    """
    chosen = cut(fields, {"first": 1, "last": 1, "visible": 2, "bias": 2}, rows)
    low, high, (length, count) = fields.low, fields.high, shape
    if low > -length or high < count - 1:
        from_band, to_band = ((rows + step)[None].clamp(0, count) for step in (low, high + 1))
        first = joined(chosen.get("first"), from_band, torch.maximum)
        last = joined(chosen.get("last"), to_band, torch.minimum)
        chosen["first"], chosen["last"] = torch.broadcast_tensors(first, last)
    return {**chosen, "low": -len(rows), "high": count}


def of_rows(sinks: Tensor) -> Tensor:
    """Sinks (H,) or (B, H, L) as (1 or B, H, 1 or L)."""
    return sinks[None, :, None] if sinks.dim() == 1 else sinks


def applicable(reasons: dict[str, bool]) -> list[Refusal]:
    """A refusal for each reason that applies."""
    return [Refusal(reason) for reason, applies in reasons.items() if applies]


def refusals_of_formula(layout: Layout, computed: frozenset[str]) -> list[Refusal]:
    """Refuse the parts of the formula that are not among the computed ones."""
    missing = [name for name in FORMULA if name in layout.formula - computed]
    if "sinks" in missing and "row_sinks" in missing:
        missing.remove("row_sinks")
    return [Refusal("it has no {part}", part=_PARTS.get(name, name)) for name in missing]


def refusals_of_heads(bound: BoundMask, gathers: bool = False) -> list[Refusal]:
    """Refuse a mask whose lowering would be as large as the scores. That of keys that a kernel gathers is not."""
    if any(part.per_head and not (gathers and part.structure.selection) for part in bound.parts):
        return [Refusal("the mask differs between heads and would have to be built whole, (B, H, L, S)")]
    return []


def refusals_of_half(layout: Layout) -> list[Refusal]:
    """Refuse half precision in PyTorch's kernels on the CPU."""
    half = layout.device.type == "cpu" and layout.dtype in (torch.bfloat16, torch.float16)
    return applicable({"on the CPU it rounds weights to half precision, which can more than double the error": half})
