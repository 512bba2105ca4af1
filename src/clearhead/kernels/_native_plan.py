"""`NativePlan`: a call of the compiled kernel but for the addresses of its tensors, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast, final

import torch
from torch import Tensor

from .._call.call import Call, Results
from .._call.layout import Placed, has_contiguous_rows, with_heads
from .._call.saved import restored
from .._checks import PLAIN
from .._native import extension, instruction_set_number
from ..errors import DeviceError
from ._native_arguments import (
    DTYPES,
    NO_LIMITS,
    BackwardArguments,
    NativeArguments,
    NativeMask,
    Strides,
    address_of,
    addresses_of,
    broadcast_strides,
    contiguous_strides,
    lowered,
    strides_of_bias_gradient,
    strides_of_gradient,
    strides_of_merged_output,
    strides_of_output,
)

_LEVELS = 1 << 16  # of the bits that decide about dropout
_WORK_OF_ONE = 1 << 11  # multiplications of scores that one thread ends before a second has begun
_PLANS = 256
_CPU = torch.device("cpu")
#: The arguments of tensors that a call does not have, before those of a backward pass.
_NO_OTHERS = (0,) * 14


@final
class NativePlan:
    """Forward, backward and statistics of all calls of some sizes and strides.

    The number of keys, the band and the addresses belong to a call, so that a plan serves a growing cache.

    Args:
        dtype: of query, key and value.
        query, key, value: shape and strides of (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv). With `sequences` B is
            1, and L and S count the tokens of all packed sequences.
        scale, softcap, dropout_p: as for `NativeArguments`.
        sequences: the number of packed sequences, or 0 for a batch. Bands and dropout count within a sequence.
        last: shape and strides of `NativeArguments.first` and `last`, or ``None``.
        visible, bias: those of these tensors, or ``None``.
        selected: those of `NativeArguments.selected`, and its `block`, or ``None``.
        bias_gradient: shape (1 or B, H, L, S) of the bias's gradient, if it may be wanted.
        differentiable: whether there may be a backward pass; the output is then float32 whatever the dtype.
        output: strides of the output. Default: heads lie beside each other where the query's do.
        gradients: strides of the gradients of query, key and value. Default: they are laid out as the inputs.
        heads: H and Hkv of merged operands (B, L, H·D), whose output and gradients are merged too.

    Example:
        >>> import torch
        >>> from clearhead.kernels._native_arguments import NativeArguments
        >>> from clearhead.kernels._native_plan import NativePlan
        >>> from clearhead._native import extension
        >>> x = torch.randn(2, 3, 5, 4)
        >>> if extension is not None:
        ...     plan = NativePlan(x.dtype, *[(x.shape, x.stride())] * 3, scale=0.5)
        ...     assert plan.forward(NativeArguments(x, x, x)).shape == x.shape
    """

    def __init__(
        self,
        dtype: torch.dtype,
        query: Placed,
        key: Placed,
        value: Placed,
        scale: float = 1.0,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        sequences: int = 0,
        row_sinks: bool = False,
        last: Placed | None = None,
        visible: Placed | None = None,
        bias: Placed | None = None,
        selected: tuple[Placed, int] | None = None,
        bias_gradient: tuple[int, ...] | None = None,
        differentiable: bool = False,
        output: Strides | None = None,
        gradients: tuple[Strides, ...] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        given = operands = query, key, value
        self._operand_strides = tuple(strides for _, strides in operands)
        counts = None if heads is None else (heads[0], heads[1], heads[1])
        if counts is not None:
            operands = tuple(map(with_heads, operands, counts))
        (batch, num_heads, rows, dim), _, (_, _, _, value_dim) = [shape for shape, _ in operands]
        # Rows with gaps are copied before each call; all other strides the kernel reads as they are.
        self._contiguous = [not has_contiguous_rows(*each) for each in given]
        self._copies = True in self._contiguous
        in_rows = [
            (shape, contiguous_strides(shape)) if copied else (shape, strides)
            for (shape, strides), copied in zip(given, self._contiguous, strict=True)
        ]
        read = [strides for _, strides in (in_rows if counts is None else map(with_heads, in_rows, counts))]
        of_inputs = gradients or [strides_of_gradient(*each) for each in given]
        self._gradients = tuple((shape, strides) for (shape, _), strides in zip(given, of_inputs, strict=True))
        if heads is None:
            self._shape = (batch, num_heads, rows, value_dim)
            self._strides = output or strides_of_output(self._shape, query[1])
            written, of_output = of_inputs, self._strides
        else:
            self._shape = (batch, rows, num_heads * value_dim)
            self._strides = strides_of_merged_output(self._shape, query[1])
            written = [strides for _, strides in map(with_heads, self._gradients, cast(Any, counts))]
            of_output = with_heads((self._shape, self._strides), num_heads)[1]
        #: The distance of the heads of a merged output gradient.
        self._head_step = None if heads is None else value_dim
        self._dtype = dtype
        self._output_dtype = torch.float32 if differentiable else dtype
        self._rows_shape = (batch, num_heads, rows)
        self._bias_shape = bias_gradient
        # Starting threads, and asking PyTorch how many there are, would take longer than a call of few keys.
        self._most_keys_of_one = _WORK_OF_ONE // max(1, batch * num_heads * rows * dim)
        built = cast(Any, extension)
        # Looked up once: tiny calls would notice.
        self._forward, self._backward, self._statistics = built.forward, built.backward, built.statistics
        names = ("query", "key", "value")
        masks = {"last": last, "visible": visible, "bias": bias}
        self._masks = last, visible, bias, selected
        (_, heads_of_selected, _, count), block = ((0,) * 4, 0) if selected is None else (selected[0][0], selected[1])
        self._plan = built.plan(
            type=DTYPES[dtype],
            query_shape=operands[0][0],
            value_shape=operands[2][0],
            **dict(zip(names, read, strict=True)),
            **{f"{name}_gradient": strides for name, strides in zip(names, written, strict=True)},
            output=of_output,
            bias_gradient=strides_of_bias_gradient(bias_gradient),
            **{name: broadcast_strides(each) for name, each in masks.items()},
            selected=broadcast_strides(None if selected is None else selected[0]),
            selection=(heads_of_selected, count, block),
            scale=scale,
            softcap=softcap,
            sequences=sequences,
            row_sinks=row_sinks,
            drop_below=round(dropout_p * _LEVELS),
            wide_output=differentiable,
        )

    def reads(self, arguments: NativeArguments) -> bool:
        """Whether operands of the plan's shapes have its strides too, and a mask is laid out as the plan's."""
        query, key, value, *_ = arguments
        if (query.stride(), key.stride(), value.stride()) != self._operand_strides:
            return False
        return placed_masks(arguments) == self._masks

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
        output = self.empty_output(arguments.query)
        if wanted:
            self.statistics(arguments, output, lse, **wanted)
        else:
            self._run(self._forward, arguments, output, lse)
        return output

    def compute(self, call: Call) -> Results:
        """The output of a call that is laid out as the plan, without gradients, lse and selected keys.

        These are the fewest steps, because tiny calls notice each.
        """
        query, key, value, sinks, sequences = call.query, call.key, call.value, call.sinks, call.sequences
        low, high, stop, *masks, _ = NO_LIMITS if call.mask is None else lowered(call.bound)
        others: Sequence[int] = ()
        if sinks is not None and sinks.dtype is not torch.float32:
            sinks = sinks.float()
        if call.seed is not None or sequences is not None:
            bounds = (None, None) if sequences is None else (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
            others = addresses_of((sinks, *masks, call.seed, *bounds), call.offset)
        elif sinks is not None or masks[1] is not None or masks[2] is not None or masks[3] is not None:
            others = [0 if x is None else x.data_ptr() for x in (sinks, *masks)]  # a call may end after any argument
        if self._copies:
            query, key, value = self._with_whole_rows(query, key, value)
        output = query.new_empty_strided(self._shape, self._strides)
        keys = key.shape[-2]
        self._forward(
            self._plan,
            instruction_set_number(),
            1 if keys <= self._most_keys_of_one else torch.get_num_threads(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            0,
            keys,
            low,
            high,
            stop,
            *others,
        )
        return Results(output)

    def empty_output(self, like: Tensor) -> Tensor:
        """(B, H, L, Dv)."""
        if self._output_dtype is like.dtype:
            return like.new_empty_strided(self._shape, self._strides)
        return like.new_empty_strided(self._shape, self._strides, dtype=self._output_dtype)

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
        if self._head_step is None:
            batch, head, row, _ = output_gradient.stride()
        else:
            (batch, row, _), head = output_gradient.stride(), self._head_step
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
        """Call a compiled function with the addresses of tensors, which are made readable."""
        query, key, value = arguments[:3]
        # The kernel would read x where a negated view means −x.
        if self._copies or query.is_neg() or key.is_neg() or value.is_neg():
            resolved = self._with_whole_rows(query.resolve_neg(), key.resolve_neg(), value.resolve_neg())
            query, key, value = resolved
            arguments = arguments._replace(query=query, key=key, value=value)
        operands = query.data_ptr(), key.data_ptr(), value.data_ptr(), address_of(output), address_of(lse)
        others = arguments.addresses_of_others()
        if backward:
            others = (*(others or _NO_OTHERS), *backward)
            if 0 in operands:
                _require_memory(arguments, output, lse)
        keys = key.shape[-2]
        threads = 1 if keys <= self._most_keys_of_one else torch.get_num_threads()
        function(self._plan, instruction_set_number(), threads, *operands, keys, *arguments.limits, *others, **wanted)

    def _with_whole_rows(self, *operands: Tensor) -> list[Tensor]:
        """Copies of the operands whose rows have gaps. The kernel reads rows whose elements lie side by side."""
        return [x.contiguous() if copy else x for x, copy in zip(operands, self._contiguous, strict=True)]


def _require_memory(arguments: NativeArguments, output: Tensor | None, lse: Tensor | None) -> None:
    """Raise for a tensor whose memory was freed since it was saved. One of no elements has none."""
    names = ("query", "key", "value", "output", "lse")
    for name, x in zip(names, (*arguments[:3], output, lse), strict=True):
        if x is not None and x.numel() and not x.data_ptr():
            got, fix = "a tensor whose memory was freed", "Free it after the backward pass, or restore it before."
            raise DeviceError(f"saved {name}", expected="the numbers that were saved", got=got, fix=fix)


def placed(tensor: Tensor | None) -> Placed | None:
    """Shape and strides."""
    return None if tensor is None else (tensor.shape, tensor.stride())


def placed_masks(mask: NativeArguments | NativeMask) -> tuple[Any, ...]:
    """Shapes and strides of `last`, `visible`, `bias` and the selected keys, with these the keys of a block."""
    selected = placed(mask.selected)
    return *map(placed, (mask.last, mask.visible, mask.bias)), None if selected is None else (selected, mask.block)


def plan_of(arguments: NativeArguments, **options: Any) -> NativePlan:
    """The plan of such calls; `options` are about gradients, by the names of `NativePlan`."""
    sinks, cu_seqlens = arguments.sinks, arguments.cu_seqlens_q
    operands = [(x.shape, x.stride()) for x in arguments[:3]]
    dropped = 0.0 if arguments.seed is None else arguments.dropout_p
    sequences = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    numbers = arguments.scale, arguments.softcap, dropped, sequences, sinks is not None and sinks.dim() > 1
    return cached_plan(arguments.query.dtype, *operands, *numbers, *placed_masks(arguments), **options)


#: `NativePlan`, of which the last ones are kept.
cached_plan = lru_cache(_PLANS)(NativePlan)
