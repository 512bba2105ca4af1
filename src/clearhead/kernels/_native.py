"""Our own CPU kernel in C++: tiles of queries in registers, online softmax, a backward pass that recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from .._call.call import Call, Results, zero_hidden
from .._call.layout import Layout
from .._call.saved import restored
from ..masks._base import Mask
from ..masks._bound import BoundMask
from ..masks._grid import Block
from ._base import Kernel, Plan, Refusal
from ._native_arguments import NativeArguments, NativeMask, lowered
from ._native_operator import count_flops
from ._native_plan import NativePlan, cached_plan, placed_masks, plan_of
from ._native_support import NATIVE_FORMULA, learnt_shape, refusals_besides_formula, refusals_of_statistics
from ._second_order import (
    Differentiable,
    OptionalTensors,
    allow_second_derivatives,
    backward_pass,
    by_reference,
    sinks_gradient,
)
from ._weights_gradient import weights_by_operations, weights_gradients


@final
class NativeKernel(Kernel):
    """Tiles of queries against blocks of keys; skips the blocks whose keys are masked for every query of a tile."""

    name: ClassVar[str] = "native"
    twice_differentiable: ClassVar[bool] = True
    #: NaN in fully masked rows, and in keys that are masked for every query, reaches neither outputs nor gradients.
    isolates_hidden: ClassVar[bool] = True
    #: `NativePlan` computes packed sequences without a mask of their boundaries.
    takes_packed: ClassVar[bool] = True
    formula: ClassVar[frozenset[str]] = NATIVE_FORMULA
    fits_all_sizes: ClassVar[bool] = True
    takes_merged: ClassVar[bool] = True

    def refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        return refusals_besides_formula(layout, bound)

    def weights_refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        return () if layout.tracing else refusals_of_statistics(layout, bound)

    def gives_weights(self, layout: Layout, bound: BoundMask) -> bool:
        # This does not depend on gradients: activation checkpointing must recompute the same bits.
        if layout.dropout_p or layout.dtype != torch.float32 or layout.tracing or layout.transformed:
            return False
        return not refusals_of_statistics(layout, bound)

    def plan(self, layout: Layout, bound: BoundMask) -> Plan:
        # The dispatcher costs more than a small attention, so only graphs and dispatch modes get the operator.
        if layout.tracing or layout.dispatching:
            return _run_operator
        planned = _native_plan(layout, layout.operand_strides, lowered(bound))
        if layout.gradients:
            return partial(_compute_with_gradients, planned, layout)
        # The layout of evaluated masks depends on the number of keys.
        if layout.lse or layout.weights is not None or not bound.structure.exact:
            return partial(_compute, planned, layout.weights, lse=layout.lse)
        return planned.compute


def _run_operator(call: Call) -> Results:
    """Run the call as an operator of PyTorch, for graphs and dispatch modes."""
    layout = call.layout
    if layout.dispatching:
        count_flops()
    output, lse = torch.ops.clearhead.attention(*arguments_of(call))
    results = Results(output, lse.float() if layout.lse else None)
    if layout.tracing or not layout.gradients:
        return results
    return allow_second_derivatives("native", call, results)


def _native_plan(
    layout: Layout,
    strides: Sequence[tuple[int, ...]],
    mask: NativeMask | NativeArguments,
    bias_gradient: tuple[int, ...] | None = None,
) -> NativePlan:
    """The plan of all calls of a layout, with operands of these strides and masks that are lowered alike."""
    operands = zip(layout.operand_shapes, strides, strict=True)
    numbers = (
        layout.scale,
        layout.softcap or 0.0,
        layout.dropout_p,
        layout.sequences or 0,
        "row_sinks" in layout.formula,
    )
    heads = (layout.query[1], layout.key[1]) if layout.merged else None
    options = {"bias_gradient": bias_gradient, "differentiable": bool(layout.gradients), "heads": heads}
    return cached_plan(layout.dtype, *operands, *numbers, *placed_masks(mask), **options)


def arguments_of(call: Call) -> NativeArguments:
    """The arguments of a call, whose mask is lowered."""
    layout, sinks, sequences = call.layout, call.sinks, call.sequences
    low, high, stop, first, last, visible, bias, selected, block = lowered(call.bound)
    return NativeArguments(
        call.query,
        call.key,
        call.value,
        None if sinks is None else sinks.float(),
        first,
        last,
        visible,
        bias,
        selected,
        call.seed,
        None if sequences is None else sequences.cu_seqlens_q,
        None if sequences is None else sequences.cu_seqlens_k,
        layout.scale,
        layout.softcap or 0.0,
        layout.dropout_p,
        block,
        low,
        high,
        stop,
        call.offset,
    )


def _plan_for(
    planned: NativePlan, call: Call, arguments: NativeArguments, bias_gradient: tuple[int, ...] | None = None
) -> NativePlan:
    """The plan, or another one for tensors laid out otherwise, as hooks return them, or for the gradient of a bias."""
    if bias_gradient is None and planned.reads(arguments):
        return planned
    strides = [x.stride() for x in arguments[:3]]
    return _native_plan(call.layout, strides, arguments, bias_gradient)


def _compute(
    planned: NativePlan, wanted: str | None, call: Call, *, lse: bool, differentiable: bool = False
) -> Results:
    """The results of a call. With gradients the output is float32, and lse, which is always returned then, float64."""
    arguments = arguments_of(call)
    plan = _plan_for(planned, call, arguments)
    found = plan.empty_lse(call.query) if lse or differentiable else None
    if wanted is None:
        weights, output = None, plan.forward(arguments, found)
    else:
        weights = empty_weights(call, average=wanted == "average")
        output = plan.forward(arguments, found, weights=weights, weights_strides=weights_strides(weights))
    return Results(output, found if found is None or differentiable else found.float(), weights)


def _compute_with_gradients(planned: NativePlan, layout: Layout, call: Call) -> Results:
    output, lse, weights = cast(Any, _Native.apply(call, planned, layout.weights, *call.inputs))
    return Results(output, lse if layout.lse else None, weights)


def empty_weights(call: Call | NativeArguments, *, average: bool) -> Tensor:
    """Zeros for the weights of a call, (B, H, L, S), or for their mean over the heads (B, L, S)."""
    (batch, heads, length, _), keys = call.query.shape, call.key.shape[2]
    shape = (batch, length, keys) if average else (batch, heads, length, keys)
    return call.query.new_zeros(shape, dtype=torch.float32)


def weights_strides(weights: Tensor) -> tuple[int, ...]:
    """Strides of items, heads and rows for `NativePlan.statistics`. Averaged heads have the stride 0."""
    items, *heads, rows, _ = weights.stride()
    return items, *(heads or [0]), rows


class _Native(torch.autograd.Function):
    """Saves inputs, output and lse; the backward pass recomputes the weights from them.

    The saved output is not rounded to half precision, so the backward pass need not compute it again. The saved lse is
    float64, because rounding it to float32 changes all weights by a relative error of the size of its last digit.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, planned: NativePlan, wanted: str | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        read_again = call.read_again
        ctx.rebuild, ctx.planned, ctx.wanted = call.rebuild(read_again), planned, wanted
        ctx.set_materialize_grads(False)
        exact, lse, weights = _compute(planned, wanted, call, lse=True, differentiable=True)
        ctx.save_for_backward(exact, lse, *inputs, *read_again)
        return exact.to(call.query.dtype), cast(Tensor, lse).float(), weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, *saved = ctx.saved_tensors
        wanted: str | None = ctx.wanted

        def by_kernel(call: Call) -> list[Tensor | None]:
            of_output, of_lse, of_weights = gradients
            if of_output is not None or of_lse is not None:
                input_gradients = _gradients(call, ctx.planned, output, lse, of_output, of_lse, ctx.needs_input_grad)
            else:
                input_gradients = cast("list[Tensor | None]", [None] * len(call.inputs))
            # Weights are before dropout and outputs after it: their gradients meet in those of the inputs only.
            if of_weights is not None:
                average = wanted == "average"
                query, key, *others = weights_gradients(zero_hidden(call), None, average, of_weights)
                through_weights = (query, key, None, *others)
                input_gradients = [_sum(*pair) for pair in zip(input_gradients, through_weights, strict=True)]
            return input_gradients

        def by_operations(call: Call) -> Differentiable:
            inputs, results = by_reference(call)
            if wanted is None:
                return inputs, results
            rebuild = call.rebuild()

            def with_weights(*tensors: Tensor) -> OptionalTensors:
                # PyTorch's operations do not isolate what the mask hides, as the kernel does.
                again = zero_hidden(rebuild(*tensors))
                return *results(*tensors), weights_by_operations(again, None, wanted == "average")

            return inputs, with_weights

        return backward_pass(ctx, gradients, lambda: ctx.rebuild(*saved), by_kernel, by_operations)


def native_gradients_of_some_keys(
    call: Call, output: Tensor, lse: Tensor, output_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of a call that holds some of the keys of a larger one.

    Args:
        call: without sinks and biases that learn, which `refusals_besides_formula` has nothing against.
        output: (B, H, L, Dv) of all keys, in float32.
        lse: (B, H, L) of all keys, sinks included, in float64.
        output_gradient: (B, H, L, Dv).
    """
    arguments = arguments_of(call)
    plan = plan_of(arguments, differentiable=True)
    query, key, value, _ = plan.backward(arguments, output, lse, output_gradient, whole_rows=False)
    return query, key, value


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


def _gradients(
    call: Call,
    planned: NativePlan,
    output: Tensor,
    lse: Tensor,
    output_gradient: Tensor | None,
    lse_gradient: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of a call's inputs from its results and theirs; `needed` ends with whether each bias needs one."""
    biases = len(call.bias_tensors)
    wanted = [index for index in range(biases) if needed[index - biases]]
    # The kernel holds the gradient of a bias, (1 or B, H, L, S): only where one is wanted.
    bias_shape = learnt_shape(call.bound) if wanted else None
    arguments = arguments_of(call)
    plan = _plan_for(planned, call, arguments, bias_shape)
    if output_gradient is None:
        output_gradient = call.query.new_zeros(output.shape)
    bias_gradient = plan.empty_bias_gradient(call.query) if wanted else None
    *input_gradients, correction = plan.backward(arguments, output, lse, output_gradient, lse_gradient, bias_gradient)
    if call.sinks is not None:
        exact_lse = restored("saved lse", lse, call.layout.query[:3], torch.float64, call.layout.device)
        input_gradients.append(sinks_gradient(call.sinks, correction, exact_lse))
    of_biases: list[Tensor | None] = [None] * biases
    if bias_gradient is not None:
        of_biases[wanted[0]] = _of_bias(call, wanted[0], bias_gradient)
    return [*input_gradients, *of_biases]


def _of_bias(call: Call, index: int, scores_gradient: Tensor) -> Tensor:
    """The gradient of a bias tensor, from that of the scores it was added to, (1 or B, H, L, S)."""
    bias = call.bias_tensors[index]
    if bias.numel() == scores_gradient.numel():
        return scores_gradient.view(bias.shape).to(bias.dtype)
    gradient = torch.zeros_like(bias, dtype=scores_gradient.dtype)  # the call reads a part of the tensor
    owners = [part for part in cast(Mask, call.mask).parts() for _ in part.bias_tensors()]
    owners[index].add_bias_gradients([gradient], Block(call.grid), scores_gradient)
    return gradient.to(bias.dtype)
