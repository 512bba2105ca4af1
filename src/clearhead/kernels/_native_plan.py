"""`NativePlan`: a call of the compiled kernel but for the addresses of its tensors, checked once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast, final

import torch
from torch import Tensor

from .._call.layout import has_contiguous_rows
from .._call.saved import restored
from .._checks import PLAIN
from .._native import extension, instruction_set_number
from ..errors import DeviceError
from ._native_arguments import (
    DTYPES,
    BackwardArguments,
    NativeArguments,
    NativeProblem,
    address_of,
    broadcast_strides,
    contiguous_strides,
    strides_of_bias_gradient,
    strides_of_gradient,
    strides_of_output,
)

_LEVELS = 1 << 16  # of the bits that decide about dropout
_WORK_OF_ONE = 1 << 11  # multiplications of scores that one thread ends before a second has begun
_PLANS = 256
_CPU = torch.device("cpu")


@final
class NativePlan:
    """Forward, backward and statistics of all calls of one problem.

    Example:
        >>> import torch
        >>> from clearhead.kernels._native_arguments import NativeArguments, NativeProblem
        >>> from clearhead.kernels._native_plan import NativePlan
        >>> from clearhead._native import extension
        >>> x = torch.randn(2, 3, 5, 4)
        >>> if extension is not None:
        ...     plan = NativePlan(NativeProblem(x.dtype, *[(x.shape, x.stride())] * 3, scale=0.5))
        ...     assert plan.forward(NativeArguments(x, x, x)).shape == x.shape
    """

    def __init__(self, problem: NativeProblem) -> None:
        layouts = problem.query, problem.key, problem.value
        self._operand_strides = tuple(strides for _, strides in layouts)
        (batch, heads, rows, dim), _, (_, _, keys, value_dim) = shapes = [shape for shape, _ in layouts]
        # Rows with gaps are copied before each call; all other strides the kernel reads as they are.
        self._contiguous = [not has_contiguous_rows(*layout) for layout in layouts]
        self._copies = True in self._contiguous
        operands = [
            contiguous_strides(shape) if copied else strides
            for (shape, strides), copied in zip(layouts, self._contiguous, strict=True)
        ]
        gradients = problem.gradients or [strides_of_gradient(*layout) for layout in layouts]
        self._gradients = tuple(zip(shapes, gradients, strict=True))
        self._shape = (batch, heads, rows, value_dim)
        self._strides = problem.output or strides_of_output(self._shape, problem.query[1])
        self._dtype = problem.dtype
        self._output_dtype = torch.float32 if problem.differentiable else problem.dtype
        self._rows_shape = (batch, heads, rows)
        self._bias_shape = problem.bias_gradient
        # Starting threads, and asking PyTorch how many there are, would take longer than such a call.
        self._one_thread = batch * heads * rows * keys * dim <= _WORK_OF_ONE
        built = cast(Any, extension)
        # Looked up once: tiny calls would notice.
        self._forward, self._backward, self._statistics = built.forward, built.backward, built.statistics
        names = ("query", "key", "value")
        self._plan = built.plan(
            type=DTYPES[problem.dtype],
            query_shape=problem.query[0],
            value_shape=problem.value[0],
            **dict(zip(names, operands, strict=True)),
            **{f"{name}_gradient": strides for name, strides in zip(names, gradients, strict=True)},
            output=self._strides,
            bias_gradient=strides_of_bias_gradient(problem.bias_gradient),
            **{name: broadcast_strides(getattr(problem, name)) for name in ("first", "visible", "bias")},
            **{name: getattr(problem, name) for name in ("scale", "softcap", "low", "high", "stop", "sequences")},
            drop_below=round(problem.dropout_p * _LEVELS),
            wide_output=problem.differentiable,
        )

    def reads(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether tensors of the problem's shapes have its strides too."""
        return (query.stride(), key.stride(), value.stride()) == self._operand_strides

    def empty_lse(self, like: Tensor) -> Tensor:
        """(B, H, L) in float64: its rounding is a relative error of the weights that a backward pass recomputes."""
        return like.new_empty(self._rows_shape, dtype=torch.float64)

    def empty_bias_gradient(self, like: Tensor) -> Tensor:
        """Zeros (1 or B, H, L, S) in float32, to which `backward` adds."""
        return like.new_zeros(cast("tuple[int, ...]", self._bias_shape), dtype=torch.float32)

    def forward(
        self, arguments: NativeArguments, lse: Tensor | None = None, **wanted: Tensor | int | tuple[int, ...] | None
    ) -> Tensor:
        """The output (B, H, L, Dv). The log-sum-exp is written to `lse`, an `empty_lse`, if it is passed.

        `wanted` as for `statistics`.
        """
        like = arguments.query
        if self._output_dtype is like.dtype:
            output = like.new_empty_strided(self._shape, self._strides)
        else:
            output = like.new_empty_strided(self._shape, self._strides, dtype=self._output_dtype)
        if wanted:
            self.statistics(arguments, output, lse, **wanted)
        else:
            self._run(self._forward, arguments, output, lse)
        return output

    def backward(
        self,
        arguments: NativeArguments,
        output: Tensor,
        lse: Tensor,
        output_gradient: Tensor,
        lse_gradient: Tensor | None = None,
        bias_gradient: Tensor | None = None,
        *,
        whole_rows: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, and δ − dl (B, H, L), from which that of the sinks follows.

        Args:
            arguments: of the forward pass.
            output: of it, in float32 whatever the dtype: δ = dO·o needs an o that is not rounded.
            lse: of it.
            output_gradient: (B, H, L, Dv).
            lse_gradient: (B, H, L), or ``None``.
            bias_gradient: an `empty_bias_gradient`, if it is wanted.
            whole_rows: whether output and lse are those of these keys, and not of a larger call.
        """
        empty = arguments.query.new_empty_strided
        dq, dk, dv = [empty(*layout) for layout in self._gradients]
        output = restored("saved output", output, self._shape, torch.float32, _CPU)
        if output.stride() != self._strides or output.is_neg():
            output = output.new_empty_strided(self._shape, self._strides).copy_(output)
        lse = restored("saved lse", lse, self._rows_shape, torch.float64, _CPU)
        if lse.is_neg() or not lse.is_contiguous():
            lse = lse.resolve_neg().contiguous()
        # Autograd itself checks the shape, the dtype and the device of a gradient.
        if type(output_gradient) not in PLAIN:
            output_gradient = restored("gradient of the output", output_gradient, self._shape, self._dtype, _CPU)
        if output_gradient.is_neg() or output_gradient.stride(-1) != 1:
            output_gradient = output_gradient.resolve_neg().contiguous()
        if lse_gradient is not None:
            lse_gradient = restored("gradient of lse", lse_gradient, self._rows_shape, torch.float32, _CPU)
            lse_gradient = lse_gradient.resolve_neg().contiguous()
        # float32 is enough: unlike lse it is no exponent, and its rounding stays a rounding.
        correction = torch.empty_like(lse, dtype=torch.float32)
        batch, head, row, _ = output_gradient.stride()
        others = BackwardArguments(  # in their order, because names would take longer than what is checked above
            output_gradient.data_ptr(),
            batch,
            head,
            row,
            address_of(lse_gradient),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            correction.data_ptr(),
            address_of(bias_gradient),
            whole_rows,
        )
        self._run(self._backward, arguments, output, lse, *others)
        return dq, dk, dv, correction

    def statistics(
        self,
        arguments: NativeArguments,
        output: Tensor | None = None,
        lse: Tensor | None = None,
        **wanted: Tensor | int | tuple[int, ...] | None,
    ) -> None:
        """Write what is wanted of the weights, which are those before dropout.

        Args:
            arguments: of the call.
            output: written like that of `forward`, or ``None``.
            lse: an `empty_lse`, or ``None``.
            wanted: tensors to write to, and sizes, by the names of `Statistics` in ``_native/problem.h``.
        """
        by_address = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in wanted.items()}
        self._run(self._statistics, arguments, output, lse, **by_address)

    def _run(
        self,
        function: Callable[..., None],
        arguments: NativeArguments,
        output: Tensor | None,
        lse: Tensor | None,
        *backward: int,
        **wanted: object,
    ) -> None:
        """Call a compiled function with the plan, the instruction set, the number of threads, and addresses."""
        query, key, value = arguments[:3]
        # The kernel reads rows whose elements lie side by side. It would read x where a negated view means −x.
        if self._copies or query.is_neg() or key.is_neg() or value.is_neg():
            resolved = (query.resolve_neg(), key.resolve_neg(), value.resolve_neg())
            query, key, value = (
                x.contiguous() if copy else x for x, copy in zip(resolved, self._contiguous, strict=True)
            )
            arguments = arguments._replace(query=query, key=key, value=value)
        threads = 1 if self._one_thread else torch.get_num_threads()
        addresses = arguments.addresses(output, lse, *backward)
        if backward and 0 in addresses[:5]:
            _require_memory(arguments, output, lse)
        function(self._plan, instruction_set_number(), threads, *addresses, **wanted)


def _require_memory(arguments: NativeArguments, output: Tensor | None, lse: Tensor | None) -> None:
    """Raise for a tensor whose memory was freed since it was saved. One of no elements has none."""
    names = ("query", "key", "value", "output", "lse")
    for name, x in zip(names, (*arguments[:3], output, lse), strict=True):
        if x is not None and x.numel() and not x.data_ptr():
            got, fix = (
                "a tensor whose memory was freed",
                "Free the storage after the backward pass, or restore it before.",
            )
            raise DeviceError(f"saved {name}", expected="the numbers that were saved", got=got, fix=fix)


def plan_of(arguments: NativeArguments, **options: Any) -> NativePlan:
    """The plan of such calls; `options` are about gradients, by the names of `NativeProblem`."""
    query, key, value, _, first, _, visible, bias, seed, cu_seqlens, _, scale, softcap, dropout_p, *band, _ = arguments
    operands = (query.shape, query.stride()), (key.shape, key.stride()), (value.shape, value.stride())
    dropped, sequences = 0.0 if seed is None else dropout_p, 0 if cu_seqlens is None else len(cu_seqlens) - 1
    ranges = None if first is None else (first.shape, first.stride())
    marks = None if visible is None else (visible.shape, visible.stride())
    added = None if bias is None else (bias.shape, bias.stride())
    numbers = scale, softcap, dropped, *band, sequences
    return _cached_plan(query.dtype, *operands, *numbers, ranges, marks, added, **options)


# Besides the cache of plans by specs, because a layout has neither the band of a lowered mask nor its tensors' strides.
@lru_cache(_PLANS)
def _cached_plan(*fields: Any, **options: Any) -> NativePlan:
    return NativePlan(NativeProblem(*fields, **options))
