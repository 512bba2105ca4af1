"""What surrounds a call: tracing, transforms, modes, autocast, hooks, observers, forced choices. Read once per call.

This is the only file that uses PyTorch's private names (the dictionaries of `nn.Module` aside). Each is looked up once,
and where PyTorch does not have it, calls take the general path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from types import FunctionType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

Choice = TypeVar("Choice")
Wrapper = TypeVar("Wrapper", bound=Tensor)
Kind = TypeVar("Kind", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])


class Forced(threading.local, Generic[Choice]):
    """Choices that context managers force in this thread, the innermost last."""

    # threading.local and not a ContextVar: torch.compile(fullgraph=True) can read this one.
    stack: tuple[Choice, ...] = ()

    @property
    def value(self) -> Choice | None:
        return self.stack[-1] if self.stack else None


class forcing(Generic[Choice]):
    """A context manager that forces one choice inside its block, in this thread."""

    def __init__(self, forced: Forced[Choice], choice: Choice) -> None:
        self._forced, self._choice = forced, choice

    def __enter__(self) -> None:
        self._forced.stack = (*self._forced.stack, self._choice)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._forced.stack = self._forced.stack[:-1]


class _State(threading.local):
    """Observers of this thread, and whether an observed call is being computed; see `_call.observers`."""

    observers: tuple[Any, ...] = ()
    computing: bool = False


state = _State()
forced_kernels: Forced[Any] = Forced()  # by `use_kernel`
forced_linears: Forced[str] = Forced()  # by `use_linear`


class Environment(NamedTuple):
    """What surrounds one call.

    Args:
        tracing: a graph is being recorded (`torch.compile`, `torch.export`, `torch.jit.trace`): sizes are symbols.
        transformed: inside `torch.func` transforms or forward-mode derivatives.
        dispatching: a `TorchDispatchMode` sees every operation.
        autocast: enabled for some device.
        module_hooks: global hooks on modules.
        gradients: whether gradients are recorded.
        observed: recorders or interventions see the call.
        kernel: forced by `use_kernel`, or ``None``.
        fused: which of PyTorch's attention backends are enabled; see `sdpa_settings`.
    """

    tracing: bool
    transformed: bool
    dispatching: bool
    autocast: bool
    module_hooks: bool
    gradients: bool
    observed: bool
    kernel: Any
    fused: tuple[object, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether only operations on values happen: plans may be cached and modules' parameters used directly."""
        return not (self.tracing or self.transformed or self.autocast or self.observed)


def _found(path: str, otherwise: Any) -> Any:
    """A private name of PyTorch, or what stands in for it."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return otherwise


def _yes(*_: object) -> bool:
    return True


def _one() -> int:
    return 1


_transforms: Callable[[], bool] = _found("_C._are_functorch_transforms_active", _yes)
_dispatch_modes: Callable[[], int] = _found("_C._len_torch_dispatch_stack", _one)
#: Whether autocast is enabled for any device.
any_autocast: Callable[[], bool] = _found("_C._is_any_autocast_enabled", _yes)
_graph_task: Callable[[], int] = _found("_C._current_graph_task_id", lambda: -1)
_legacy_batched: Callable[[Tensor], bool] = _found("_C._functorch.is_legacy_batchedtensor", lambda _: False)
_global_hooks: Callable[[], bool] = _found("nn.modules.module._has_any_global_hook", _yes)
_functorch: Any = _found("_C._functorch", None)
#: Whether PyTorch's compiler can build for this processor.
has_avx2: Callable[[], bool] = _found("cpu._is_avx2_supported", lambda: False)
_wrap: Callable[..., Tensor] | None = _found("Tensor._make_wrapper_subclass", None)
_forward_level: Any = _found("autograd.forward_ad", None)


def read_environment() -> Environment:
    """The environment of the call that runs now."""
    if is_tracing():  # what a graph holds must not depend on what else surrounds its first call
        grad = torch.is_grad_enabled()
        return Environment(True, False, False, False, False, grad, False, forced_kernels.value)
    return Environment(
        False,
        is_transformed(),
        _dispatch_modes() > 0,
        any_autocast(),
        _global_hooks(),
        torch.is_grad_enabled(),
        bool(state.observers) and not state.computing and bool(listening()),
        forced_kernels.value,
        sdpa_settings(),
    )


def is_tracing() -> bool:
    """True while a graph is being recorded (`torch.compile`, `torch.export`): sizes are symbols, values unknown."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_transformed() -> bool:
    """True inside `torch.func` transforms and forward-mode derivatives, which only plain operations can follow."""
    if is_tracing():
        return False
    return bool(_transforms()) or getattr(_forward_level, "_current_level", 0) >= 0


def is_dispatching() -> bool:
    """True where a `TorchDispatchMode` sees every operation (`make_fx`): what an extension computes it would miss."""
    return _dispatch_modes() > 0


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is one of many that are mapped over (``is_grads_batched=True``, `torch.func.vmap`)."""
    return _transforms() or _legacy_batched(gradient)


def in_backward() -> bool:
    """Whether a backward pass runs, in which activation checkpointing repeats calls."""
    return _graph_task() != -1


def listening() -> tuple[Any, ...]:
    """The observers that are shown calls now: in a backward pass only those that change outputs."""
    if not in_backward():
        return state.observers
    return tuple(observer for observer in state.observers if observer.recomputing)


def is_compiled(module: nn.Module) -> bool:
    """Whether `nn.Module.compile` has replaced what calling the module does."""
    return getattr(module, "_compiled_call_impl", None) is not None


def has_hook(module: nn.Module, hook: object) -> bool:
    """Whether a function is one of a module's forward hooks, before or after."""
    own = vars(module)
    return any(each is hook for name in ("_forward_pre_hooks", "_forward_hooks") for each in own[name].values())


def remove_hook(module: nn.Module, hook: object) -> None:
    """Undo what registered it: the handle that PyTorch gave is neither copied nor pickled with the module."""
    own = vars(module)
    for hooks in (own["_forward_pre_hooks"], own["_forward_hooks"]):
        for number in [number for number, each in hooks.items() if each is hook]:
            del hooks[number]
            own["_forward_hooks_with_kwargs"].pop(number, None)
            own["_forward_hooks_always_called"].pop(number, None)


@contextmanager
def calls_uncompiled(modules: Iterable[nn.Module]) -> Generator[None, None, None]:
    """Undo `nn.Module.compile` inside the block."""
    compiled = [(module, getattr(module, "_compiled_call_impl", None)) for module in modules if is_compiled(module)]
    try:
        for module, _ in compiled:
            setattr(module, "_compiled_call_impl", None)  # noqa: B010
        yield
    finally:
        for module, call in compiled:
            setattr(module, "_compiled_call_impl", call)  # noqa: B010


def as_written(function: object) -> Any:
    """The function that `torch.compile` was given to make this one; ``None`` of what it did not make."""
    return getattr(function, "_torchdynamo_orig_callable", None) if isinstance(function, FunctionType) else None


def is_compiler_error(kind: type[BaseException]) -> bool:
    """Whether an error comes from tracing a graph."""
    return kind.__module__ == "torch._dynamo.exc"


def skips_idle_hook(hook: Callable[..., None]) -> Callable[[type[Kind]], type[Kind]]:
    """Class decorator: modules whose only hook is this one, which does nothing, save tiny calls its cost."""

    def decorate(kind: type[Kind]) -> type[Kind]:
        general: Callable[..., Any] | None = getattr(kind, "_call_impl", None)
        if general is None:
            return kind

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = module._forward_pre_hooks
            if (
                len(hooks) == 1
                and hook in hooks.values()
                and not (module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
                and not _global_hooks()
                and not is_tracing()
            ):
                return module.forward(*args, **kwargs)
            return general(module, *args, **kwargs)

        setattr(kind, "_call_impl", call)  # noqa: B010
        return kind

    return decorate


def _device_type(tensor: object) -> str:
    """The type of device whose autocast counts; for one without autocast (meta) the CPU's."""
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


def autocast_off(tensor: Tensor) -> torch.autocast:
    """Inside a kernel the dtypes are already decided."""
    return torch.autocast(_device_type(tensor), enabled=False)


#: Which of PyTorch's attention backends a call would take; ``None`` where PyTorch does not say.
fused_sdpa_choice: Callable[..., int] | None = _found("_fused_sdp_choice", None)

_sdpa_flags: tuple[Callable[[], object], ...] = (
    _found("_C._get_flash_sdp_enabled", tuple),
    _found("_C._get_mem_efficient_sdp_enabled", tuple),
    _found("_C._get_cudnn_sdp_enabled", tuple),
    _found("_C._get_math_sdp_enabled", tuple),
    _found("_C._get_deterministic_algorithms", tuple),
)
_sdpa_order: Callable[[], list[int]] = _found("_C._get_sdp_priority_order", list)


def sdpa_settings() -> tuple[object, ...]:
    """The process's settings that `fused_sdpa_choice` depends on: what `torch.nn.attention.sdpa_kernel` changes."""
    flash, efficient, cudnn, math, deterministic = _sdpa_flags
    return flash(), efficient(), cudnn(), math(), deterministic(), *_sdpa_order()


#: What makes a tensor subclass leave PyTorch's functions as they are.
disabled_torch_function: Any = _found("_C._disabled_torch_function_impl", None)

_onednn: Any = _found("ops.mkldnn", None)


def has_onednn_linear() -> bool:
    """Whether PyTorch was built with oneDNN and its operator for linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(_onednn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X Wᵀ + b on oneDNN's GEMM, without gradients."""
    return _onednn._linear_pointwise(x, weight, bias, "none", [], "")


def mark_static(tensor: Tensor, dim: int) -> None:
    """Tell `torch.compile` that a size is a constant."""
    getattr(torch._dynamo, "mark_static", _yes)(tensor, dim)  # pyright: ignore


def graph_break() -> None:
    """End the graph that is being traced here."""
    getattr(torch._dynamo, "graph_break", _yes)()  # pyright: ignore


def outside_graphs(function: Function) -> Function:
    """Decorator: `torch.compile` ends its graph before the function, and runs it and all that it calls as it is."""
    disable: Any = torch.compiler.disable
    return disable(function)


def outside_graphs_alone(function: Function) -> Function:
    """Decorator: `torch.compile` ends its graph before the function, and traces what it calls."""
    disable: Any = torch.compiler.disable
    return disable(function, recursive=False)


def timeout_of(group: Any, device: torch.device | str) -> timedelta | None:
    """After how long a collective of a process group fails; ``None`` if that is unknown."""
    try:
        return group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def sizes_apart() -> AbstractContextManager[None]:
    """Sizes that happen to be equal when a graph is compiled may differ later."""
    try:
        from torch.fx.experimental import _config
    except ImportError:
        return nullcontext()
    return _config.patch(use_duck_shape=False)  # pyright: ignore


def is_rows_of(tensor: Any) -> bool:
    """Whether a jagged tensor is (B, lengths, features) without holes."""
    return tensor.dim() == 3 and getattr(tensor, "_ragged_idx", 1) == 1 and tensor.lengths() is None


#: Whether a padding mask hides only the ends of sequences, which `nn.TransformerEncoder` turns into nested tensors.
left_aligned_padding: Callable[..., bool] | None = _found("_nested_tensor_from_mask_left_aligned", None)


def is_vmapped(tensor: Tensor) -> bool:
    """Whether `torch.func.vmap` maps over a tensor, also inside other transforms."""
    if _functorch is None:
        return is_transformed()
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


#: Whether tensors can be made whose values are computed when an operator reads them.
has_wrappers = disabled_torch_function is not None and _wrap is not None


def wrapper_of(kind: type[Wrapper], shape: tuple[int, ...], **options: Any) -> Wrapper:
    """A tensor of a subclass that has a shape, a dtype and a device, but no values; see `has_wrappers`."""
    return cast(Wrapper, cast(Any, _wrap)(kind, shape, **options))


#: Collectives by their names since PyTorch 2.13, where the older ones warn.
all_gather_single: Any = _found("distributed.all_gather_single", _found("distributed.all_gather_into_tensor", None))
reduce_scatter_single: Any = _found(
    "distributed.reduce_scatter_single", _found("distributed.reduce_scatter_tensor", None)
)
