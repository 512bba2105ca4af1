"""`activate`: PyTorch's own attention on Clearhead's CPU kernel, for the process."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, final

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from .._environment import ACTIVATED, is_activated
from ..errors import ArgumentError, KernelError


def register() -> None:
    """Enter the name into PyTorch's registry, so that ``activate_flash_attention_impl("clearhead")`` finds it."""
    register_flash_attention_impl(ACTIVATED, register_fn=_install)


@final
class Activation:
    """What `activate` returns: a context manager that restores what was active before, and `remove`."""

    def __init__(self, installed: _Installed | None) -> None:
        self._installed = installed  # None inside another activation, which then stays
        self._removed = False

    def remove(self) -> None:
        """Restore PyTorch's kernels, unless they are back already, or were activated anew since."""
        if self._installed is not None and self._installed.libraries and is_activated():
            restore_flash_attention_impl()
        self._removed = True

    def __enter__(self) -> Activation:
        if self._removed:
            fix = "Call clearhead.activate() again."
            raise ArgumentError("activate()", expected="an activation that holds", got="one that has ended", fix=fix)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def activate() -> Activation:
    """Run PyTorch's `scaled_dot_product_attention` and `varlen_attn` on Clearhead's kernel on the CPU.

    One line makes every model that calls `torch.nn.functional.scaled_dot_product_attention` faster: those of timm,
    diffusers and transformers (``attn_implementation="sdpa"``), and your own. Gradients and compiled graphs use the
    kernel as well. `torch.nn.attention.varlen.varlen_attn`, which PyTorch has for GPUs only, then runs on the CPU.

    It is ``torch.nn.attention.activate_flash_attention_impl("clearhead")``, through PyTorch's registry, and holds for
    the whole process until `torch.nn.attention.restore_flash_attention_impl`, `Activation.remove` or the end of a
    ``with`` block. Small calls, float64, dropout, float masks with gradients and a ``value`` of other width stay on
    PyTorch's kernels, as do all calls on other devices.

    Returns:
        An `Activation`. Use it as a context manager, or ignore it.

    Raises:
        ArgumentError: if another implementation, such as ``"FA4"``, is active. PyTorch has one at a time.
        KernelError: if Clearhead was installed without its compiled kernel.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 4, 64, 32)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> with clearhead.activate():
        ...     output = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(output, expected, atol=1e-5)
        True
    """
    active = current_flash_attention_impl()
    if active == ACTIVATED:
        return Activation(None)
    if active is not None:
        fix = "PyTorch has one implementation at a time: call torch.nn.attention.restore_flash_attention_impl() first."
        raise ArgumentError("activate()", expected="no other active implementation", got=repr(active), fix=fix)
    activate_flash_attention_impl(ACTIVATED)
    return Activation(_latest[-1])


@final
class _Installed:
    """The kernels in PyTorch's dispatcher: what its registry calls a handle."""

    def __init__(self, libraries: list[torch.library.Library]) -> None:
        self.libraries: list[torch.library.Library] = libraries

    def remove(self) -> None:
        self.libraries = []  # a library that nothing holds takes its kernels out of the dispatcher


#: The last handle that PyTorch's registry was given, which it does not return.
_latest: list[_Installed] = []


def _install() -> _Installed:
    """Put the kernels into PyTorch's dispatcher. PyTorch's registry calls it."""
    from .._native import extension, why_missing

    if extension is None:
        raise KernelError(
            f'activate_flash_attention_impl("{ACTIVATED}"): Clearhead\'s kernel is missing: {why_missing}.'
        )
    from . import _sdpa, _varlen

    installed = _Installed(
        [_registered(_sdpa.KERNELS, "aten", with_keyset=True), _registered(_varlen.KERNELS, "torch_attn")]
    )
    _latest[:] = [installed]
    return installed


def _registered(kernels: dict[str, Any], namespace: str, **options: bool) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        # To override is what PyTorch's registry is for.
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True, **options)
    return library
