"""The GEMM of linear layers, x Wᵀ + b, on the faster of the two backends that PyTorch ships for this machine."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._call.call_types import LinearForward
from .._call.saved import restored
from .._checks import FLOATS, PLAIN, flag, kind, require_factory, same_device, shown, size, strided_or_jagged
from .._environment import Environment, autocast_is_on, forced_linears, forcing, is_tracing, read_environment
from .._native import extension, instruction_set_number
from .._proxies import quantizes, recorded_module
from .._torch_private import has_onednn_linear, onednn_linear
from ..errors import ArgumentError, ClearheadError, DeviceError, DTypeError, KernelError, ShapeError, shape_text

Backend = Literal["pytorch", "onednn"]
#: A GEMM: of an input (…, in_features), a weight (out_features, in_features) and a bias, which may be ``None``.
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
BACKENDS: tuple[Backend, ...] = ("pytorch", "onednn")

#: Smaller GEMMs end before oneDNN has begun, and few rows only stream the weight through.
_FEWEST_MULTIPLICATIONS = 1 << 23
_FEWEST_ROWS = 16

_NO_ONEDNN = "this build of PyTorch has no oneDNN"


class use_linear(forcing[str]):
    """Choose the GEMM backend of linear layers inside a ``with`` block, in this thread.

    Args:
        name: ``"pytorch"`` (`torch.nn.functional.linear`) or ``"onednn"``. oneDNN never falls back: it raises if
            it cannot run a GEMM. Graphs that are traced inside hold PyTorch's operator.

    Raises:
        ArgumentError: for an unknown name. Inside the block, `KernelError` where oneDNN cannot run a GEMM.

    Example:
        >>> import torch, clearhead
        >>> with clearhead.use_linear("pytorch"):
        ...     clearhead.nn.Linear(3, 2)(torch.randn(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, name: Backend) -> None:
        if not isinstance(name, str) or name not in BACKENDS:
            raise ArgumentError("name", expected=f"one of {', '.join(BACKENDS)}", got=shown(name))
        super().__init__(forced_linears, name)


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`: the same parameters, results to rounding, and gradients.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`.

    Example:
        >>> import torch, clearhead
        >>> clearhead.nn.Linear(3, 2)(torch.randn(5, 3)).shape
        torch.Size([5, 2])
    """

    __call__: LinearForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        size("in_features", in_features, 0)
        size("out_features", out_features, 0)
        require_factory(device, dtype)
        super().__init__(in_features, out_features, flag("bias", bias), device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features).

        Raises:
            ShapeError, DTypeError, DeviceError: if the input does not fit the weight.
        """
        try:
            return linear(input, self.weight, self.bias)
        except (RuntimeError, TypeError, AttributeError, NotImplementedError):
            try:
                require_linear("input", input, self)  # only after an error, so that ordinary calls skip the check
            except ClearheadError as error:
                # Quantization knows modules by their classes, and functions.
                if quantizes(input):
                    return F.linear(input, self.weight, self.bias)
                return recorded_module(self, error, locals())
            raise


def require_linear(name: str, x: object, layer: nn.Linear) -> None:
    """Raise unless the weight of a linear layer accepts the input."""
    x = strided_or_jagged(name, x)
    if x.dim() == 0 or x.shape[-1] != layer.in_features:
        expected = f"(…, {layer.in_features})"
        raise ShapeError(name, expected=expected, got=kind(x))
    require_same(name, x, layer.weight)


def require_tokens(name: str, x: object, features: int | None, fix: str = "") -> Tensor:
    """A float tensor (B, length, features), or (length, features) without a batch. ``None`` allows any features."""
    x = strided_or_jagged(name, x)
    if x.dtype not in FLOATS:
        raise DTypeError(name, expected="a floating point tensor", got=str(x.dtype), fix="Embed token ids first.")
    if x.dim() not in (2, 3) or (features is not None and x.shape[-1] != features):
        last = "features" if features is None else features
        expected = f"(B, length, {last}), or (length, {last}) without a batch"
        raise ShapeError(name, expected=expected, got=shape_text(x.shape), fix=fix)
    return x


def require_same(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise unless an input has the dtype and the device of a module's weight, or autocast converts its dtype."""
    if weight.is_meta and not x.is_meta:
        fix = "Load them first, for example with module.to_empty(device=...) and load_state_dict."
        expected = f"parameters on the input's device {x.device}"
        raise DeviceError(name, expected=expected, got="a module on meta, without values", fix=fix)
    same_device(name, x, weight.device, "the module's device", "Move the input or the module")
    if x.dtype != weight.dtype and not (autocast_is_on(x) and x.is_floating_point()):
        fix = f"Convert the input with .to({weight.dtype}), or the module."
        raise DTypeError(name, expected=f"the module's dtype {weight.dtype}", got=str(x.dtype), fix=fix)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, environment: Environment | None = None) -> Tensor:
    """`torch.nn.functional.linear`, y = x Wᵀ + b, on oneDNN's GEMM where the rule of `describe_backend` says so.

    Gradients of every order, autocast, tracing and `torch.func` are as for PyTorch's: what oneDNN's operator does
    not support, PyTorch's computes.

    Args:
        input: (…, in_features).
        weight: (out_features, in_features).
        bias: (out_features,). Default: none.
        environment: of the call, if it was read before.

    Returns:
        (…, out_features).

    Raises:
        KernelError: under ``use_linear("onednn")``, if oneDNN cannot run it.
    """
    forced = forced_linears.value
    if forced == "pytorch" or (is_tracing() if environment is None else environment.tracing):
        return F.linear(input, weight, bias)
    if not forced:
        if _why_pytorchs():
            return F.linear(input, weight, bias)
        if type(input) not in PLAIN or type(weight) not in PLAIN:
            return F.linear(strided_or_jagged("input", input), weight, bias)
        # Most GEMMs of small models end here, before anything else is compared.
        if _is_small(input.numel(), weight):
            return F.linear(input, weight, bias)
    environment = environment or read_environment()
    against = _against(input, weight, bias, environment)
    if forced and not has_onednn_linear():
        against = _NO_ONEDNN
    if forced and against:
        raise KernelError(
            f'use_linear("onednn"): oneDNN cannot run this GEMM: {against}. Use use_linear("pytorch") for it.'
        )
    if against:
        return F.linear(input, weight, bias)
    product = _gemm(input.reshape(-1, input.shape[-1]), weight, bias, environment)  # (rows, out_features)
    return product.view(*input.shape[:-1], weight.shape[0])


def gemm_of(inputs: Sequence[Tensor], linears: Sequence[Any], environment: Environment) -> Multiply:
    """The GEMM of all projections of an attention layer: PyTorch's where the sizes decide, else `linear`.

    Args:
        inputs: query, key and value of the layer.
        linears: weight and bias of each projection, in turn; the output projection is the last one.
        environment: of the call.
    """
    *of_inputs, of_output = linears[::2]
    pairs = [(x.numel(), weight) for x, weight in zip(inputs, of_inputs, strict=False)]
    query = inputs[0]
    pairs.append((query.numel() // max(1, query.shape[-1]) * of_output.shape[-1], of_output))
    forced = forced_linears.value
    by_pytorch = not query.is_cpu or _why_pytorchs() or all(_is_small(*pair) for pair in pairs)
    if forced == "pytorch" or (not forced and by_pytorch):
        return F.linear
    return functools.partial(linear, environment=environment)


def _is_small(elements: int, weight: Tensor) -> bool:
    """Whether PyTorch's GEMM of so many elements is the faster one by its sizes alone."""
    return elements * weight.shape[0] < _FEWEST_MULTIPLICATIONS or elements < _FEWEST_ROWS * weight.shape[-1]


def chosen_backend() -> Backend:
    """The backend that is forced in this thread, or preferred on this machine."""
    return cast("Backend | None", forced_linears.value) or ("pytorch" if _why_pytorchs() else "onednn")


def describe_backend() -> str:
    """Which GEMM the projections use on this machine, and why, in a line.

    The rule goes by the processor's maker, how PyTorch was built, and the sizes, and never by measurements, so that two
    runs give the same bits. ``python -m benchmarks.cpu.linear`` measures what it stands on.

    Example:
        >>> import clearhead
        >>> from clearhead._layer.linear import describe_backend
        >>> with clearhead.use_linear("pytorch"):
        ...     describe_backend()
        "PyTorch's, forced by use_linear"
    """
    if forced_linears.value:
        maker = "PyTorch" if forced_linears.value == "pytorch" else "oneDNN"
        return f"{maker}'s, forced by use_linear"
    if why := _why_pytorchs():
        return f"PyTorch's: {why}"
    return (
        f"oneDNN's for float32 from {_FEWEST_ROWS} rows and {_FEWEST_MULTIPLICATIONS} multiplications on: on "
        "processors of AMD it outruns the MKL that PyTorch uses"
    )


@functools.cache
def _why_pytorchs() -> str | None:
    """The rule, as far as machine and build decide; ``None`` where oneDNN's GEMM is preferred."""
    if not has_onednn_linear():
        return _NO_ONEDNN
    if not torch.backends.mkl.is_available():
        return "this build of PyTorch has no MKL to be faster than"
    maker = processor_maker()
    if maker != "AuthenticAMD":
        return f"oneDNN is not known to be faster than MKL on this processor ({maker})"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "oneDNN is not known to be faster without AVX2"
    return None


def processor_maker() -> str:
    """The processor's own name for its maker, such as ``GenuineIntel``. The architecture where there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("vendor_id"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    described = platform.processor()  # on Windows "AMD64 Family 25 …, AuthenticAMD"
    return described.rsplit(", ", 1)[-1] or platform.machine()


def _against(input: Tensor, weight: Tensor, bias: Tensor | None, environment: Environment) -> str | None:
    """Why oneDNN's operator cannot replace `F.linear` here, or ``None`` if it can."""
    if not torch.backends.mkldnn.enabled:
        return "oneDNN is switched off"
    tensors = (input, weight) if bias is None else (input, weight, bias)
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return f"it does not support {type(tensor).__name__}"
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return "all tensors have to be dense, of float32 and on the CPU"
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1] or 0 in (*input.shape, *weight.shape):
        return "it needs a weight (out_features, in_features), an input (…, in_features) and no size of 0"
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return "it needs a bias (out_features,)"
    if environment.autocast:
        return "autocast chooses another dtype"
    if torch.get_float32_matmul_precision() != "highest":
        return "torch.set_float32_matmul_precision has allowed less precise GEMMs"
    if environment.transformed:
        return "torch.func and forward-mode derivatives support PyTorch's alone"
    if environment.dispatching:
        return "a TorchDispatchMode sees every operation"
    return None


def _gemm(x: Tensor, weight: Tensor, bias: Tensor | None, environment: Environment) -> Tensor:
    """X Wᵀ + b of (rows, in_features) on oneDNN, recorded for gradients only where they are wanted."""
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if wanted and environment.gradients:
        return cast(Tensor, _Gemm.apply(x, weight, bias))
    return onednn_linear(_in_rows(x), weight, bias)


def _in_rows(x: Tensor) -> Tensor:
    """(rows, in_features) in rows, as oneDNN reads it. PyTorch writes a transposed gradient out by one thread."""
    if extension is None or x.is_contiguous() or not x.t().is_contiguous() or x.is_neg():
        return x
    (rows, columns), written = x.shape, x.new_empty(x.shape)
    arguments = torch.get_num_threads(), columns, rows, x.data_ptr(), written.data_ptr(), columns
    cast(Any, extension).transpose(instruction_set_number(), *arguments)
    return written


class _Gemm(torch.autograd.Function):
    """Its two gradients are GEMMs of the same kind, g W and gᵀ x, and so are theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.in_features = weight.shape[1]
        return onednn_linear(_in_rows(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        (rows, out_features), cpu = gradient.shape, torch.device("cpu")
        saved_x, saved_weight = ctx.saved_tensors
        x = restored("saved input", saved_x, (rows, ctx.in_features), torch.float32, cpu)
        weight = restored("saved weight", saved_weight, (out_features, ctx.in_features), torch.float32, cpu)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # Where a backward pass runs under autocast, F.linear would cast what was saved in float32.
        with torch.autocast("cpu", enabled=False):
            environment = read_environment()
            return (
                _again(gradient, weight.t(), environment) if needs_x else None,
                _again(gradient.t(), x.t(), environment) if needs_weight else None,
                gradient.sum(0) if needs_bias else None,
            )


def _again(x: Tensor, weight: Tensor, environment: Environment) -> Tensor:
    against = _against(x, weight, None, environment)
    return F.linear(x, weight) if against else _gemm(x, weight, None, environment)
