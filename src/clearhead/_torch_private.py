"""PyTorch's private names. This is the only file that uses them, the dictionaries of `nn.Module` aside.

Each is looked up once, and where PyTorch does not have it, calls take the general path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

Wrapper = TypeVar("Wrapper", bound=Tensor)
Kind = TypeVar("Kind", bound=nn.Module)


def _lookup(path: str, default: Any) -> Any:
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return default


def _true(*_: object) -> bool:
    return True


_transforms: Callable[[], bool] = _lookup("_C._are_functorch_transforms_active", _true)
_graph_task: Callable[[], int] = _lookup("_C._current_graph_task_id", lambda: -1)
_frame_compiler: Callable[[], object] = _lookup("_C._dynamo.eval_frame.get_eval_frame_callback", lambda: None)
_legacy_batched: Callable[[Tensor], bool] = _lookup("_C._functorch.is_legacy_batchedtensor", lambda _: False)
_functorch: Any = _lookup("_C._functorch", None)
_forward_level: Any = _lookup("autograd.forward_ad", None)
_wrap: Callable[..., Tensor] | None = _lookup("Tensor._make_wrapper_subclass", None)
_onednn: Any = _lookup("ops.mkldnn", None)
_has_pairs: Callable[[], bool] = _lookup("cpu._is_avx512_bf16_supported", bool)
_has_tiles: Callable[[], bool] = _lookup("cpu._is_amx_tile_supported", bool)
_sdpa_flags: tuple[Callable[[], object], ...] = (
    _lookup("_C._get_flash_sdp_enabled", tuple),
    _lookup("_C._get_mem_efficient_sdp_enabled", tuple),
    _lookup("_C._get_cudnn_sdp_enabled", tuple),
    _lookup("_C._get_math_sdp_enabled", tuple),
    _lookup("_C._get_deterministic_algorithms", tuple),
)
_global_hooks: tuple[dict[int, object], ...] = (
    _lookup("nn.modules.module._global_forward_pre_hooks", {0: _true}),
    _lookup("nn.modules.module._global_forward_hooks", {0: _true}),
    _lookup("nn.modules.module._global_backward_pre_hooks", {0: _true}),
    _lookup("nn.modules.module._global_backward_hooks", {0: _true}),
)
_sdpa_order: Callable[[], list[int]] = _lookup("_C._get_sdp_priority_order", list)

#: How many `TorchDispatchMode`s intercept every operation (`make_fx`). They do not intercept an extension.
dispatch_modes: Callable[[], int] = _lookup("_C._len_torch_dispatch_stack", lambda: 1)
#: How many `TorchFunctionMode`s see every call of a function of PyTorch.
function_modes: Callable[[], int] = _lookup("_C._len_torch_function_stack", lambda: 1)
#: Whether `torch.jit.trace` records a graph. `torch.jit.is_tracing` takes longer to say so.
in_jit_trace: Callable[[], bool] = _lookup("_C._is_tracing", torch.jit.is_tracing)
#: Whether autocast is enabled for any device.
any_autocast: Callable[[], bool] = _lookup("_C._is_any_autocast_enabled", _true)
#: Whether hooks are registered for all modules.
any_global_hook: Callable[[], bool] = _lookup("nn.modules.module._has_any_global_hook", _true)
#: The tensor whose memory a view shows; ``None`` of what is no view, and of views in inference mode.
viewed: Callable[[Tensor], Tensor | None] = _lookup("Tensor._base", property(lambda _: None)).__get__
#: The functions of the innermost `torch.autograd.graph.saved_tensors_hooks`, pack and unpack, or ``None``.
saving_hooks: Callable[[bool], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = _lookup(
    "_C._autograd._top_saved_tensors_default_hooks", lambda _: None
)
#: Whether PyTorch's compiler can build for this processor.
has_avx2: Callable[[], bool] = _lookup("cpu._is_avx2_supported", lambda: False)
#: Which of PyTorch's attention backends a call would take; ``None`` where PyTorch does not say.
fused_sdpa_choice: Callable[..., int] | None = _lookup("_fused_sdp_choice", None)
#: The value that makes a tensor subclass leave PyTorch's functions as they are.
disabled_torch_function: Any = _lookup("_C._disabled_torch_function_impl", None)
#: Whether tensors can be made whose values are computed when an operator reads them.
has_wrappers = disabled_torch_function is not None and _wrap is not None
#: Whether a padding mask hides only the ends of sequences, which `nn.TransformerEncoder` turns into nested tensors.
left_aligned_padding: Callable[..., bool] | None = _lookup("_nested_tensor_from_mask_left_aligned", None)
#: A block in which forward-mode differentiation is on or off, as `torch.set_grad_enabled` is for reverse mode.
set_tangents_enabled: Any = _lookup("autograd.forward_ad._set_fwd_grad_enabled", nullcontext)
#: Collectives by their names since PyTorch 2.13, where the older ones warn.
all_gather_single: Any = _lookup("distributed.all_gather_single", _lookup("distributed.all_gather_into_tensor", None))
reduce_scatter_single: Any = _lookup(
    "distributed.reduce_scatter_single", _lookup("distributed.reduce_scatter_tensor", None)
)

#: The attribute that `nn.Module.compile` sets.
COMPILED_CALL = "_compiled_call_impl"

_mode_of: Callable[[Any], Any] = _lookup("_C._get_dispatch_mode", lambda _: None)
_VALUELESS = tuple(_lookup(f"_C._TorchDispatchModeKey.{name}", None) for name in ("FAKE", "PROXY"))
_fake: type | tuple[()] = _lookup("_subclasses.FakeTensor", ())
_mode_stack: Callable[[], list[Any]] = _lookup("utils._python_dispatch._get_current_dispatch_mode_stack", list)


def has_valueless_mode() -> bool:
    """Whether a mode runs under which no value may be read: that of fake tensors, or that of `make_fx`."""
    return dispatch_modes() > 0 and any(_mode_of(key) is not None for key in _VALUELESS)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, but is not on meta."""
    return type(tensor) is not Tensor and isinstance(tensor, _fake)


def register_flop_formulas(formulas: dict[Any, Callable[..., int]]) -> None:
    """Tell `torch.utils.flop_counter` how many operations operators take, also the counters that run.

    Nothing is done unless it was imported, which takes long where Triton is installed.
    """
    counting: Any = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    for operator, formula in formulas.items():
        if operator not in counting.flop_registry:
            counting.register_flop_formula(operator)(formula)
        for mode in _mode_stack():  # each counter copies the formulas when it is made
            registry = getattr(getattr(mode, "counter", None), "flop_registry", {})
            registry.setdefault(operator, counting.flop_registry[operator])


def writes_to(tensor: Tensor) -> int | None:
    """How often a tensor was written to; ``None`` of an inference tensor, whose writes are not counted."""
    return None if tensor.is_inference() else getattr(tensor, "_version", None)


def any_transform() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation runs, also while a graph is traced."""
    return bool(_transforms()) or getattr(_forward_level, "_current_level", 0) >= 0


# `torch.compile` guards graphs by the transforms around them, so it calls this function and holds a constant result.
any_transform._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is one of many that are mapped over (``is_grads_batched=True``, `torch.func.vmap`)."""
    return _transforms() or _legacy_batched(gradient)


def _any_vmap() -> bool:
    if _functorch is None:
        return any_transform()
    return any(each.key() == _functorch.TransformType.Vmap for each in _functorch.get_interpreter_stack() or ())


_any_vmap._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def is_vmapped(tensor: Tensor) -> bool:
    """Whether `torch.func.vmap` maps over a tensor, also inside other transforms; in a graph, whether it runs."""
    if not any_transform():
        return False
    if _functorch is None or torch.compiler.is_compiling():
        return _any_vmap()
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def in_backward() -> bool:
    """Whether a backward pass runs, in which activation checkpointing repeats calls. A graph is traced before it."""
    return not torch.compiler.is_compiling() and _graph_task() != -1


def in_compiled_function() -> bool:
    """Whether a compiled function runs, also one whose graphs are broken and whose Python runs between them."""
    return torch.compiler.is_compiling() or _frame_compiler() not in (None, False)


def sdpa_settings() -> tuple[object, ...]:
    """The process's settings that `fused_sdpa_choice` depends on: what `torch.nn.attention.sdpa_kernel` changes."""
    flash, efficient, cudnn, math, deterministic = _sdpa_flags
    return flash(), efficient(), cudnn(), math(), deterministic(), *_sdpa_order()


def has_onednn_linear() -> bool:
    """Whether PyTorch was built with oneDNN and its operator for linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(_onednn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", kind: str = "") -> Tensor:
    """f(X Wᵀ + b) on oneDNN's GEMM, without gradients. The weight may be one of `onednn_weight`."""
    return _onednn._linear_pointwise(x, weight, bias, activation, [], kind)


def onednn_weight(weight: Tensor) -> Tensor:
    """A copy of a weight (out, in), laid out as oneDNN's GEMM reads it fastest."""
    return _onednn._reorder_linear_weight(weight.contiguous())


def has_bfloat16_products() -> bool:
    """Whether the processor multiplies pairs or tiles of bfloat16 (AVX512-BF16, AMX)."""
    return bool(_has_pairs() or _has_tiles())


def wrapper_of(kind: type[Wrapper], shape: tuple[int, ...], **options: Any) -> Wrapper:
    """A tensor of a subclass that has a shape, a dtype and a device, but no values, if `has_wrappers` is true."""
    return cast(Wrapper, cast(Any, _wrap)(kind, shape, **options))


def is_rows_of(tensor: Any) -> bool:
    """Whether a jagged tensor is (B, lengths, features) without holes."""
    return tensor.dim() == 3 and ragged_dimension(tensor) == 1


def ragged_dimension(tensor: Any) -> int | None:
    """The dimension in which the sequences of a jagged tensor differ; ``None`` if there are holes between them."""
    return getattr(tensor, "_ragged_idx", 1) if tensor.lengths() is None else None


def timeout_of(group: Any, device: torch.device | str) -> timedelta | None:
    """After how long a collective of a process group fails; ``None`` if that is unknown."""
    try:
        return group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def has_hook(module: nn.Module, hook: object) -> bool:
    """Whether a function is one of a module's forward hooks, before or after."""
    fields = vars(module)
    return any(each is hook for name in ("_forward_pre_hooks", "_forward_hooks") for each in fields[name].values())


def remove_hook(module: nn.Module, hook: object) -> None:
    """Undo what registered it: the handle that PyTorch gave is neither copied nor pickled with the module."""
    fields = vars(module)
    for hooks in (fields["_forward_pre_hooks"], fields["_forward_hooks"]):
        for number in [number for number, each in hooks.items() if each is hook]:
            del hooks[number]
            fields["_forward_hooks_with_kwargs"].pop(number, None)
            fields["_forward_hooks_always_called"].pop(number, None)


def any_foreign_global_hook() -> bool:
    """Whether hooks for all modules are registered, other than those by which PyTorch's tools name what runs."""
    hooks = (hook for hooks in _global_hooks for hook in hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)


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
                and not any_global_hook()
                and not torch.compiler.is_compiling()
                and not torch.jit.is_tracing()
            ):
                return module.forward(*args, **kwargs)
            return general(module, *args, **kwargs)

        setattr(kind, "_call_impl", call)  # noqa: B010
        return kind

    return decorate


def is_compiled(module: nn.Module) -> bool:
    """Whether `nn.Module.compile` has replaced what calling the module does."""
    return getattr(module, COMPILED_CALL, None) is not None


@contextmanager
def calls_uncompiled(modules: Iterable[nn.Module]) -> Generator[None, None, None]:
    """Undo `nn.Module.compile` inside the block."""
    compiled = {module: vars(module)[COMPILED_CALL] for module in modules if is_compiled(module)}
    try:
        for module in compiled:
            vars(module)[COMPILED_CALL] = None
        yield
    finally:
        for module, call in compiled.items():
            vars(module)[COMPILED_CALL] = call


def as_written(function: object) -> Any:
    """The function that `torch.compile` was given to make this one; ``None`` of what it did not make."""
    return getattr(function, "_torchdynamo_orig_callable", None) if isinstance(function, FunctionType) else None


def is_compiler_error(kind: type[BaseException]) -> bool:
    """Whether an error comes from tracing a graph."""
    return kind.__module__ == "torch._dynamo.exc"


def mark_static(tensor: Tensor, dim: int) -> None:
    """Tell `torch.compile` that a size is a constant."""
    getattr(torch._dynamo, "mark_static", _true)(tensor, dim)  # pyright: ignore


def graph_break() -> None:
    """End the graph that is being traced here."""
    getattr(torch._dynamo, "graph_break", _true)()  # pyright: ignore


@contextmanager
def sizes_apart() -> Generator[None, None, None]:
    """Sizes that happen to be equal when a graph is compiled may differ later, and floats are constants of a graph."""
    with ExitStack() as settings:
        for module, setting in (
            ("torch.fx.experimental._config", {"use_duck_shape": False}),
            ("torch._dynamo.config", {"specialize_float": True, "specialize_int": True}),
        ):
            try:
                settings.enter_context(import_module(module).patch(**setting))
            except (ImportError, AttributeError):
                continue
        yield
