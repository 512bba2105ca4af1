"""Which kernel runs a call: the first in order of preference that has nothing against it, or the forced one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from .._call.call import Call
from .._checks import shown
from .._environment import forced_kernels, forcing, is_activated
from .._native import extension
from ..errors import ArgumentError, KernelError
from ._base import Kernel, Refusal, refusals_of_formula
from ._chunked import ChunkedKernel
from ._flex import FlexKernel
from ._flex_choice import leaves_to_flex, reservation_of_flex
from ._native import NativeKernel
from ._reference import ReferenceKernel
from ._sdpa import SdpaKernel
from ._sinks_check import distrusts_sinks

#: In order of preference. Outside graphs `flex` refuses all that `chunked` refuses, so that nothing is compiled unless
#: it is forced, or `chunked` leaves a call to it (`leaves_to_flex`). `reference` refuses nothing.
KERNELS: tuple[Kernel, ...] = (NativeKernel(), SdpaKernel(), ChunkedKernel(), FlexKernel(), ReferenceKernel())

_WORTH_THREADS = 1 << 20  # multiplications of scores that take longer on one thread than PyTorch's kernel on several


class use_kernel(forcing[Kernel]):
    """Force one kernel inside a ``with`` block, in this thread; it raises instead of falling back.

    Args:
        name: ``"native"``, ``"sdpa"``, ``"chunked"``, ``"flex"`` or ``"reference"``. ``"flex"`` is compiled for each
            new signature of a call, which takes seconds. It is chosen by itself only on a GPU, for long masks and for
            calls that no other fused kernel runs.

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
        super().__init__(forced_kernels, _named(name))


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a call, and what every kernel refuses it for.

    Args:
        kernel: name of the kernel that runs; ``None`` if the forced one refuses.
        reasons: for each kernel in order of preference its reasons against the call; empty if it can run it.
        forced: whether `use_kernel` decided.
        projections: which GEMM backend a module's projections use on the CPU, and why.
        backend: which kernel of PyTorch runs on a GPU: ``"cuDNN"``, ``"flash"``, ``"efficient"`` (memory-efficient
            attention) or ``"varlen"`` (flash attention for packed sequences). Empty on the CPU, and for other kernels.
        active: whether `clearhead.activate` holds, so that PyTorch's own attention runs on Clearhead's kernel.
        faster: what would have to change for a faster backend, such as ``"flash without dropout"``.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 2, 3, 4)
        >>> with clearhead.use_kernel("chunked"):
        ...     explanation = clearhead.explain(x, x, x)
        >>> explanation.kernel, explanation.forced
        ('chunked', True)
    """

    kernel: str | None
    reasons: dict[str, tuple[str, ...]]
    forced: bool
    projections: str = ""
    backend: str = ""
    faster: tuple[str, ...] = ()
    active: bool = False

    def __str__(self) -> str:
        how = " (forced by use_kernel)" if self.forced else ""
        lines = [f"runs on: {self.kernel or 'no kernel'}{how}"]
        for name, reasons in self.reasons.items():
            lines.append(f"  {name:<10} {'; '.join(reasons) if reasons else 'can run it'}")
        if self.backend:
            faster = f"; faster: {', or '.join(self.faster)}" if self.faster else ""
            lines.append(f"backend: {self.backend}{faster}")
        if self.projections:
            lines.append(f"projections: {self.projections}")
        if self.active:
            lines.append(
                "activated: PyTorch's scaled_dot_product_attention runs on Clearhead's kernel where it is faster"
            )
        return "\n".join(lines)


def choose(call: Call, forced: Kernel | None) -> Kernel:
    """The forced kernel, or the preferred one.

    Raises:
        KernelError: if the forced kernel refuses, with its reasons and which kernels can run it.
    """
    if forced is None:
        return _first(KERNELS, call) or KERNELS[-1]
    refusals = _refusals(forced, call)
    if refusals:
        reasons = "; ".join(str(reason) for reason in refusals)
        able = [kernel.name for kernel in KERNELS if not _refusals(kernel, call)]
        raise KernelError(
            f"use_kernel({forced.name!r}): this kernel cannot run the call: {reasons}. "
            f"Leave the choice to Clearhead, or force one that can: {', '.join(able)}."
        )
    return forced


def choose_for_packed(call: Call, forced: Kernel | None) -> Kernel | None:
    """The kernel that computes packed sequences in one call. ``None`` if each sequence must be a separate call.

    A forced kernel then runs, or refuses, each of them.
    """
    if forced is None:
        return _first((kernel for kernel in KERNELS if kernel.takes_packed), call)
    # It may refuse only packed sequences. Each sequence can then run as a separate call.
    return forced if forced.takes_packed and not _against(forced, call) else None


def _first(kernels: Iterable[Kernel], call: Call) -> Kernel | None:
    """The first that can run the call, and does not leave it to another."""
    # Gradients matter for a bias that learns, and on a GPU for a log-sum-exp (`return_lse`). All other calls run on the
    # same kernel when checkpointing computes them again.
    for kernel in kernels:
        if not (_against(kernel, call) or _reservations(kernel, call)):
            return kernel
    return None


def _reservations(kernel: Kernel, call: Call) -> tuple[Refusal, ...]:
    """Reasons to leave a supported call to a later kernel, unless `use_kernel` forces this one."""
    layout = call.layout
    request = layout, call.bound
    if layout.dispatching and layout.weights is not None and not kernel.gives_weights(*request):
        return (Refusal("a TorchDispatchMode would see the scores computed twice, for the output and for weights"),)
    if kernel.name == "native":
        batch, heads, length, dim = layout.query
        # A graph must depend neither on the number of threads nor on a product of sizes.
        lacks_threads = extension and not (extension.openmp or layout.tracing or torch.get_num_threads() == 1)
        if lacks_threads and batch * heads * length * layout.key[2] * dim >= _WORTH_THREADS:
            return (Refusal("it was built without OpenMP and would run on one thread"),)
    elif kernel.name == "chunked" or (kernel.name == "sdpa" and not layout.lse):
        untrusted = distrusts_sinks(layout) if kernel.name == "sdpa" else ()
        return untrusted or leaves_to_flex(*request)
    elif kernel.name == "flex":
        return reservation_of_flex(*request)
    return ()


def _against(kernel: Kernel, call: Call) -> tuple[Refusal, ...]:
    """All reasons against a call on this kernel, whoever computes its weights."""
    missing = refusals_of_formula(call.layout, kernel.formula)
    return (*kernel.refusals(call.layout, call.bound), *missing)


def _refusals(kernel: Kernel, call: Call) -> tuple[Refusal, ...]:
    """All reasons against a call on this kernel, if no other kernel computes its weights."""
    layout, bound = call.layout, call.bound
    against_weights = () if layout.weights is None else kernel.weights_refusals(layout, bound)
    return _against(kernel, call) + against_weights


def explain_call(call: Call, projections: str) -> Explanation:
    """Every kernel's reasons against a call."""
    request, forced = (call.layout, call.bound), forced_kernels.value
    reasons: dict[str, tuple[str, ...]] = {}
    for kernel in KERNELS:
        reserved = () if kernel is forced else _reservations(kernel, call)
        reasons[kernel.name] = tuple(map(str, _against(kernel, call) + reserved))
    kernel = choose(call, None) if forced is None else None if reasons[forced.name] else forced
    backend = None if kernel is None else kernel.backend(*request)
    explanation = Explanation(
        None if kernel is None else kernel.name, reasons, forced is not None, projections, active=is_activated()
    )
    return explanation if backend is None else replace(explanation, backend=backend.name, faster=backend.faster)


def _named(name: str) -> Kernel:
    for kernel in KERNELS:
        if isinstance(name, str) and kernel.name == name:
            return kernel
    raise ArgumentError("name", expected=f"one of {', '.join(kernel.name for kernel in KERNELS)}", got=shown(name))
