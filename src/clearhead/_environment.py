"""The environment of a call: tracing, transforms, modes, autocast, hooks, observers, forced choices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.attention
from torch import Tensor

from ._torch_private import (
    any_autocast,
    any_global_hook,
    any_transform,
    dispatch_modes,
    has_valueless_mode,
    in_backward,
    in_jit_trace,
    is_fake,
    is_vmapped,
    set_tangents_enabled,
)

Choice = TypeVar("Choice")
Function = TypeVar("Function", bound=Callable[..., Any])


class Forced(threading.local, Generic[Choice]):
    """The choice that the innermost context manager forces in this thread, or ``None``, and those outside it."""

    # threading.local and not a ContextVar: torch.compile(fullgraph=True) can read this one.
    value: Choice | None = None
    outer: tuple[Choice | None, ...] = ()


class forcing(Generic[Choice]):
    """A context manager that forces one choice inside its block, in this thread."""

    def __init__(self, forced: Forced[Choice], choice: Choice) -> None:
        self._forced, self._choice = forced, choice

    def __enter__(self) -> None:
        forced = self._forced
        forced.outer, forced.value = (*forced.outer, forced.value), self._choice

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        forced = self._forced
        forced.outer, forced.value = forced.outer[:-1], forced.outer[-1]


#: The name of Clearhead in PyTorch's registry of implementations of flash attention.
ACTIVATED = "clearhead"


class _State(threading.local):
    """Observers of this thread, and whether an observed call is being computed. `_call.observers` uses both."""

    observers: tuple[Any, ...] = ()
    computing: bool = False


state = _State()
forced_kernels: Forced[Any] = Forced()  # by `use_kernel`
forced_linears: Forced[str] = Forced()  # by `use_linear`
_checked: Forced[bool] = Forced()  # by `check_values`


class check_values(forcing[bool]):
    """Check values that lie on a GPU too, inside a ``with`` block, in this thread.

    Clearhead checks lengths, positions, marks, boundaries and indices. On the CPU it always does. On a GPU each check
    waits for the device, so it is left out. Wrong values then never read or write outside a tensor, and the page on
    GPUs says what each of them does. Use the block to look for a mistake. Graphs are never checked.

    Raises:
        ArgumentError, DTypeError, CacheError: inside the block, for the first wrong value.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 2, 3, 4)
        >>> with clearhead.check_values():
        ...     clearhead.attention(x, x, x, clearhead.masks.lengths(torch.tensor([2]))).shape
        torch.Size([1, 2, 3, 4])
    """

    def __init__(self) -> None:
        super().__init__(_checked, True)


def reads_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor are checked now."""
    if not (tensor.is_cpu or _checked.value) or tensor.is_meta or is_tracing():
        return False
    return not (is_fake(tensor) or has_valueless_mode() or is_vmapped(tensor))


class Environment(NamedTuple):
    """The state around one call. A public entry reads it once.

    Args:
        tracing: a graph is being recorded (`torch.compile`, `torch.export`, `torch.jit.trace`): sizes are symbols.
        transformed: inside `torch.func` transforms or forward-mode derivatives.
        dispatching: a `TorchDispatchMode` intercepts every operation.
        autocast: enabled for some device.
        module_hooks: global hooks on modules.
        gradients: whether gradients are recorded.
        observed: recorders or interventions receive the call.
        kernel: forced by `use_kernel`, or ``None``.
    """

    tracing: bool
    transformed: bool
    dispatching: bool
    autocast: bool
    module_hooks: bool
    gradients: bool
    observed: bool
    kernel: Any

    @property
    def sees_modules(self) -> bool:
        """Whether something sees or changes what modules compute inside: observers, transforms, modes, global hooks."""
        return self.observed or self.transformed or self.dispatching or self.module_hooks


#: Nothing surrounds a call, without gradients and with them.
_QUIET = tuple(Environment(False, False, False, False, False, gradients, False, None) for gradients in (False, True))


def read_environment() -> Environment:
    """The environment of the call that runs now."""
    if torch.compiler.is_compiling() or in_jit_trace():  # what a graph holds must not depend on what else surrounds it
        grad = torch.is_grad_enabled()
        return Environment(True, any_transform(), False, False, False, grad, False, forced_kernels.value)
    kernel, observers, transformed = forced_kernels.value, state.observers, any_transform()
    if not (transformed or dispatch_modes() or any_autocast() or any_global_hook() or observers or kernel is not None):
        return _QUIET[torch.is_grad_enabled()]
    observed = bool(observers) and not state.computing and bool(listening())
    around = transformed, dispatch_modes() > 0, any_autocast(), any_global_hook(), torch.is_grad_enabled()
    return Environment(False, *around, observed, kernel)


def is_tracing() -> bool:
    """True while a graph is being recorded (`torch.compile`, `torch.export`): sizes are symbols, values unknown."""
    return torch.compiler.is_compiling() or in_jit_trace()


def is_activated() -> bool:
    """Whether `clearhead.activate` holds: PyTorch's own attention runs on Clearhead's kernel on the CPU."""
    return torch.nn.attention.current_flash_attention_impl() == ACTIVATED


def has_values() -> bool:
    """False while tracing, in transforms and forward-mode derivatives, and with fake tensors: no value may be read."""
    return not is_tracing() and not any_transform() and not has_valueless_mode()


def listening() -> tuple[Any, ...]:
    """The observers that receive calls now. In a backward pass these are the observers that change outputs."""
    if not in_backward():
        return state.observers
    return tuple(observer for observer in state.observers if observer.recomputing)


def _device_type(tensor: object) -> str:
    """The type of device whose autocast applies. It is the CPU for a device without autocast, such as meta."""
    if isinstance(tensor, Tensor) and torch.amp.is_autocast_available(tensor.device.type):
        return tensor.device.type
    return "cpu"


def autocast_is_on(tensor: Tensor) -> bool:
    """Whether autocast is enabled for the tensor's device."""
    return torch.is_autocast_enabled(_device_type(tensor))


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts the inputs of PyTorch's own attention: floats, but not float64."""
    device = _device_type(tensors[0])
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype)
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )


@contextmanager
def no_derivatives() -> Generator[None]:
    """A block that records no gradients and, which `torch.no_grad` leaves on, no derivatives in forward mode."""
    with torch.no_grad():
        if any_transform():
            with set_tangents_enabled(False):
                yield
        else:
            yield


def autocast_off(tensor: Tensor) -> torch.autocast:
    """Inside a kernel the dtypes are already decided."""
    return torch.autocast(_device_type(tensor), enabled=False)


def outside_graphs(function: Function) -> Function:
    """Decorator: `torch.compile` ends its graph before the function, and traces neither it nor its calls."""
    disable: Any = torch.compiler.disable
    return disable(function)


def outside_graphs_alone(function: Function) -> Function:
    """Decorator: `torch.compile` ends its graph before the function, and traces what it calls."""
    disable: Any = torch.compiler.disable
    return disable(function, recursive=False)
