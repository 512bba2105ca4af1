"""Which kernel runs a call, and why not the others."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import TracebackType

from torch import Tensor

from .._call.dropout import draw_seed
from .._call.spec import AttentionCall
from .._checks import shown
from .._environment import is_tracing
from .._layer.linear import describe_product
from ..errors import ArgumentError, KernelError, explain_problem
from ._base import Kernel, Refusal
from ._chunked import ChunkedKernel
from ._flex import FlexKernel
from ._native import NativeKernel
from ._reference import ReferenceKernel
from ._sdpa import SdpaKernel
from ._second_order import allow_second_derivatives

__all__ = ["KERNELS", "Explanation", "choose", "explain_call", "forced_kernel", "run", "use_kernel"]

#: In order of preference; the first without a reason against the call runs it. `reference` refuses nothing.
KERNELS: tuple[Kernel, ...] = (NativeKernel(), SdpaKernel(), ChunkedKernel(), FlexKernel(), ReferenceKernel())


class _Forced(threading.local):
    # threading.local and not a ContextVar: torch.compile(fullgraph=True) can read this one.
    stack: tuple[Kernel, ...] = ()

    @property
    def kernel(self) -> Kernel | None:
        return self.stack[-1] if self.stack else None


_forced = _Forced()


def forced_kernel() -> Kernel | None:
    """The kernel that `use_kernel` has chosen in this thread."""
    return _forced.kernel


class use_kernel:
    """Force one kernel inside a ``with`` block, in this thread; it raises instead of falling back.

    Args:
        name: ``"native"``, ``"sdpa"``, ``"chunked"``, ``"flex"`` or ``"reference"``. ``"flex"`` is compiled for each
            kind of call, which takes seconds, and is never chosen by itself.

    Raises:
        ArgumentError: for an unknown name. Inside the block, `KernelError` where the kernel refuses a call.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 2, 3, 4)
        >>> with clearhead.use_kernel("reference"):
        ...     clearhead.attention(x, x, x).shape
        torch.Size([1, 2, 3, 4])
    """

    def __init__(self, name: str) -> None:
        self._kernel = _named(name)

    def __enter__(self) -> None:
        _forced.stack = (*_forced.stack, self._kernel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _forced.stack = _forced.stack[:-1]


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a call and what every kernel says to it.

    Args:
        kernel: name of the kernel that runs; ``None`` if the forced one refuses.
        reasons: for each kernel in order of preference its reasons against the call; empty if it can run it.
        forced: whether `use_kernel` decided.
        projections: which product a module's projections use on the CPU, and why; see `clearhead._layer.linear`.
    """

    kernel: str | None
    reasons: dict[str, tuple[str, ...]]
    forced: bool
    projections: str = ""

    def __str__(self) -> str:
        how = " (forced by use_kernel)" if self.forced else ""
        lines = [f"runs on: {self.kernel or 'no kernel'}{how}"]
        for name, reasons in self.reasons.items():
            lines.append(f"  {name:<10} {'; '.join(reasons) if reasons else 'can run it'}")
        if self.projections:
            lines.append(f"projections: {self.projections}")
        return "\n".join(lines)


def run(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute the call on the kernel that `choose` picks."""
    kernel = choose(call)
    if call.dropout_p > 0 and not isinstance(kernel, SdpaKernel):
        call = replace(call, dropout_seed=draw_seed(call.query.device))
    output, lse = kernel.run(call)
    if kernel.twice_differentiable or is_tracing() or not output.requires_grad:
        return output, lse
    return allow_second_derivatives(kernel.name, call, output, lse)


def choose(call: AttentionCall) -> Kernel:
    """The forced kernel, or the first that has nothing against the call.

    Raises:
        KernelError: if the forced kernel refuses, with its reasons and what the others would say.
    """
    forced = _forced.kernel
    if forced is None:
        return _preferred(call)
    refusals = forced.refusals(call)
    if refusals:
        reasons = "; ".join(str(reason) for reason in refusals)
        able = [kernel.name for kernel in KERNELS if not kernel.refusals(call)]
        raise KernelError(
            f"use_kernel({forced.name!r}): this kernel cannot run the call: {reasons}. "
            f"Leave the choice to Clearhead, or force one that can: {', '.join(able)}."
        )
    return forced


def explain_call(call: AttentionCall) -> Explanation:
    """Ask every kernel for its reasons."""
    reasons = {kernel.name: tuple(map(str, _reasons(kernel, call))) for kernel in KERNELS}
    projections = describe_product() if call.query.is_cpu else ""
    if _forced.kernel is not None:
        name = _forced.kernel.name
        return Explanation(None if reasons[name] else name, reasons, True, projections)
    return Explanation(_preferred(call).name, reasons, False, projections)


def _reasons(kernel: Kernel, call: AttentionCall) -> tuple[Refusal, ...]:
    forced = kernel is _forced.kernel
    return kernel.refusals(call) + (() if forced else kernel.reservations(call))


def _preferred(call: AttentionCall) -> Kernel:
    # Nothing here may depend on gradients: what checkpointing computes again must be the same to the last bit.
    return next(kernel for kernel in KERNELS if not (kernel.refusals(call) or kernel.reservations(call)))


def _named(name: str) -> Kernel:
    for kernel in KERNELS:
        if isinstance(name, str) and kernel.name == name:
            return kernel
    raise ArgumentError(
        explain_problem("name", expected=f"one of {', '.join(kernel.name for kernel in KERNELS)}", got=shown(name))
    )
