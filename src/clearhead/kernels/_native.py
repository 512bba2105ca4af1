"""Our own CPU kernel in C++: tiles of queries in registers, online softmax, a backward pass that recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from .._environment import is_dispatching, is_tracing, is_transformed
from .._native import extension, why_missing
from . import _native_operator  # noqa: F401  # pyright: ignore[reportUnusedImport]  # defines the operators
from ._base import Kernel, Refusal
from ._native_masks import differs_between_heads, learnt_shape, lower
from ._native_plan import DTYPES, NativeArguments
from ._second_order import allow_second_derivatives, backward_pass, reference_results, sinks_gradient
from ._weights_gradient import weights_by_operations, weights_gradients

__all__ = ["NativeKernel", "arguments_of", "native_results"]

_WORTH_THREADS = 1 << 20  # multiplications of scores that take longer on one thread than PyTorch's kernel on several


@final
class NativeKernel(Kernel):
    """Tiles of queries against blocks of keys; skips the blocks of which no query of a tile sees a key."""

    name: ClassVar[str] = "native"
    twice_differentiable: ClassVar[bool] = True
    #: NaN in fully masked rows, and in keys that are masked for every query, reaches neither outputs nor gradients.
    isolates_hidden: ClassVar[bool] = True
    #: `NativePlan` computes documents end to end without a mask of their boundaries.
    takes_documents: ClassVar[bool] = True

    def refusals(self, spec: AttentionSpec, mask: Mask | None) -> tuple[Refusal, ...]:
        return native_refusals(spec, mask)

    def reservations(self, spec: AttentionSpec, mask: Mask | None) -> tuple[Refusal, ...]:
        if extension is None or extension.openmp or spec.tracing or torch.get_num_threads() == 1:
            return ()
        batch, heads, length, dim = spec.query.shape
        if batch * heads * length * spec.key.shape[2] * dim < _WORTH_THREADS:
            return ()
        return (Refusal("it was built without OpenMP and would run on one thread"),)

    def gives_weights(self, spec: AttentionSpec, mask: Mask | None) -> bool:
        # Whatever the gradients: what checkpointing computes again must be the same to the last bit.
        plain = not spec.dropout_p and spec.dtype == torch.float32 and not spec.tracing and not spec.transformed
        return plain and spec.documents is None and not refuses_statistics(spec, mask)

    def plan(self, spec: AttentionSpec, mask: Mask | None) -> Plan:
        if spec.tracing or spec.dispatching:
            return _as_operator
        if spec.documents is not None:
            return partial(_with_lowering, _lower_documents)
        if mask is None:
            return partial(_with_lowering, _Fixed(spec, Lowered.everything(spec.grid)))
        return partial(_with_lowering, lower)


def arguments_of(call: AttentionCall) -> NativeArguments:
    """The call with its mask lowered."""
    lowered = lower(call)
    first, last = lowered.spans or (None, None)
    return NativeArguments(
        call.query,
        call.key,
        call.value,
        call.sinks,
        lowered.visible,
        lowered.bias,
        first,
        last,
        call.dropout_seed,
        call.scale,
        call.softcap or 0.0,
        call.dropout_p,
        lowered.low,
        lowered.high,
        lowered.stop,
    )


def native_results(call: AttentionCall, weights: str | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, the log-sum-exp if the call wants it, and weights if they are wanted, with gradients.

    Args:
        call: one that the kernel does not refuse; with weights, in float32 and without dropout.
        weights: ``"heads"`` for all of them (B, H, L, S), ``"mean"`` for their mean over heads (B, L, S).
    """
    if call.needs_gradients:
        output, lse, found = cast("tuple[Tensor, Tensor, Tensor | None]", _Native.apply(call, weights, *call.inputs))
        return output, lse if call.return_lse else None, found
    output, lse, found = _compute(call, weights, call.return_lse, wide=False)
    return output, None if lse is None else lse.float(), found


def _compute(
    call: AttentionCall, weights: str | None, with_lse: bool, wide: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    arguments = arguments_of(call)
    plan = arguments.plan(wide=wide)
    lse = plan.empty_lse(call.query) if with_lse else None
    if weights is None:
        return plan.forward(*arguments.inputs, arguments.extras, lse), lse, None
    (batch, heads, length, _), keys = call.query.shape, call.key.shape[2]
    shape = (batch, length, keys) if weights == "mean" else (batch, heads, length, keys)
    output, found = plan.empty_output(call.query), call.query.new_zeros(shape, dtype=torch.float32)
    matrix = length * keys
    strides = (matrix, 0, keys) if weights == "mean" else (heads * matrix, matrix, keys)
    plan.statistics(*arguments.inputs, arguments.extras, output, lse, weights=found, weights_strides=strides)
    return output, lse, found


class _Native(torch.autograd.Function):
    """Saves inputs, output and lse; the backward pass recomputes the weights from them.

    The output that is saved is not rounded to half precision: the backward pass would have to compute it once more. Nor
    is lse rounded to float32, which would be a relative error of all weights as large as the last digit of lse.
    """

    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, weights: str | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.call, ctx.weights = call.without_tensors(), weights
        ctx.set_materialize_grads(False)
        exact, lse, found = _compute(call, weights, True, wide=True)
        lse = cast(Tensor, lse)
        ctx.save_for_backward(exact, lse, *inputs)
        return exact.to(call.query.dtype), lse.float(), found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, *inputs = ctx.saved_tensors

        def own() -> list[Tensor | None]:
            call, (of_output, of_lse, of_weights) = ctx.call.with_tensors(*inputs), gradients
            found: list[Tensor | None] = [None] * len(inputs)
            if of_output is not None or of_lse is not None:
                found = _gradients(call, output, lse, of_output, of_lse, ctx.needs_input_grad)
            if of_weights is not None:
                query, key, *rest = weights_gradients(call, None, ctx.weights == "mean", of_weights)
                found = [_sum(*both) for both in zip(found, (query, key, None, *rest), strict=True)]
            return found

        def recompute(*tensors: Tensor) -> tuple[Tensor | None, ...]:
            results = reference_results(ctx.call)(*tensors)
            if ctx.weights is None:
                return tuple(results)
            return *results, weights_by_operations(ctx.call.with_tensors(*tensors), None, ctx.weights == "mean")

        return backward_pass(ctx, gradients, inputs, own, recompute)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _gradients(
    call: AttentionCall,
    output: Tensor,
    lse: Tensor,
    output_gradient: Tensor | None,
    lse_gradient: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of a call's inputs from its results and theirs; `needed` ends with whether each bias needs one."""
    arguments = arguments_of(call)
    if output_gradient is None:
        output_gradient = torch.zeros_like(output, dtype=call.query.dtype)
    biases = len(call.bias_tensors)
    wanted = [index for index in range(biases) if needed[index - biases]]
    plan, extras = arguments.plan(wide=True, bias_gradient=learnt_shape(call) if wanted else None), arguments.extras
    bias_gradient = plan.empty_bias_gradient(output) if wanted else None
    *found, correction = plan.backward(
        *arguments.inputs, output, lse, output_gradient, lse_gradient, extras, bias_gradient
    )
    if call.sinks is not None:
        found.append(sinks_gradient(call.sinks, correction, lse))
    of_biases: list[Tensor | None] = [None] * biases
    if bias_gradient is not None:
        bias = call.bias_tensors[wanted[0]]
        of_biases[wanted[0]] = bias_gradient.view(bias.shape).to(bias.dtype)
    return [*found, *of_biases]
