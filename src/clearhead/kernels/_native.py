"""Our own CPU kernel in C++: tiles of queries in registers, online softmax, a backward pass that recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from .._environment import is_dispatching, is_tracing, is_transformed
from .._native import extension, why_missing
from ._base import Kernel, Plan, Refusal
from ._native_calls import TYPES, Request, backward, empty_lse, forward
from ._native_masked import masked
from ._native_masks import differs_between_heads, learnt_shape, lower
from ._native_operator import sinks_gradient
from ._native_prepared import Prepared, differentiable, prepare_apart, prepare_flat
from ._second_order import allow_second_derivatives, backward_pass, reference_results

__all__ = ["NativeKernel", "native_gradients", "request_of"]


@final
class NativeKernel(Kernel):
    """Tiles of queries against blocks of keys; skips the blocks that nobody in the tile sees."""

    name: ClassVar[str] = "native"
    twice_differentiable: ClassVar[bool] = True

    def refusals(self, call: AttentionCall) -> tuple[Refusal, ...]:
        if extension is None:
            return (Refusal("{reason}", reason=why_missing),)
        reasons: list[Refusal] = []
        query = call.query
        if query.device.type != "cpu":
            reasons.append(Refusal("it runs on the CPU, and the tensors are on {device}", device=query.device))
        if query.dtype not in TYPES:
            reasons.append(Refusal("it computes in float32, and the tensors are {dtype}", dtype=query.dtype))
        if call.bias_tensors and torch.is_grad_enabled() and not _can_differentiate_biases(call):
            reasons.append(Refusal("it gives a gradient for one bias (1 or B, H, L, S) only, and none in a graph"))
        reasons += _reasons_of_a_graph() if is_tracing() else _reasons_of_values(call)
        return tuple(reasons)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if is_tracing() or is_dispatching():
            output, lse = torch.ops.clearhead.attention(*vars(request_of(call)).values())
            lse = lse.float()
            if not is_tracing() and output.requires_grad:
                output, lse = allow_second_derivatives(self.name, call, output, lse)
        elif call.needs_gradients:
            output, lse = cast("tuple[Tensor, Tensor]", _Native.apply(call, *call.inputs))
        else:
            exact = empty_lse(call.query) if call.return_lse else None
            output = forward(request_of(call), exact)
            lse = None if exact is None else exact.float()
        return output, lse if call.return_lse else None

    def prepare(self, call: AttentionCall) -> Plan:
        request = _plain_request(call)
        prepared = None if request is None else prepare_apart(request)
        if prepared is None or (call.needs_gradients and call.query.dtype != torch.float32):
            return super().prepare(call)
        if call.needs_gradients:
            compute = differentiable(call.without_tensors(), prepared)
            return lambda query, key, value, _mask: compute(query, key, value, None)
        return lambda query, key, value, _mask: prepared.forward((query, key, value))[0]

    def prepare_masked(self, call: AttentionCall) -> Plan | None:
        request = _plain_request(call, masked=True)
        prepared = None if request is None else prepare_apart(request)
        if prepared is None or (call.needs_gradients and call.query.dtype != torch.float32):
            return None
        return masked(self, call, prepared)

    def prepare_flat(self, call: AttentionCall, projected: tuple[Tensor, ...]) -> Prepared | None:
        request = _plain_request(call, masked=True)
        if request is None or any(mask is not None and mask.shape[1] > 1 for mask in (request.visible, request.bias)):
            return None
        return prepare_flat(request, projected)


def _reasons_of_a_graph() -> list[Refusal]:
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return [Refusal("an exported graph holds PyTorch's own operators only")]
    return []


def _reasons_of_values(call: AttentionCall) -> list[Refusal]:
    if is_transformed():
        return [Refusal("its own backward cannot be transformed by torch.func or derived forwards")]
    for tensor in (call.query, call.key, call.value):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return [Refusal("it reads plain tensors only, and one is a {kind}", kind=type(tensor).__name__)]
    if call.mask is not None and differs_between_heads(call):
        return [Refusal("the mask differs between heads and would have to be built whole, (B, H, L, S)")]
    return []


def _can_differentiate_biases(call: AttentionCall) -> bool:
    if not any(bias.requires_grad for bias in call.bias_tensors):
        return True
    if is_tracing() or is_dispatching():
        return False
    return learnt_shape(call) is not None


def request_of(call: AttentionCall) -> Request:
    """The call with its mask lowered."""
    lowered = lower(call)
    first, last = lowered.spans or (None, None)
    return Request(
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


def _plain_request(call: AttentionCall, masked: bool = False) -> Request | None:
    """The request of a call that has nothing but query, key, value, a band and, where they may be, tensors of masks."""
    if call.return_lse or call.dropout_p or call.sinks is not None:
        return None
    request = request_of(call)
    return request if request.first is None and (masked or request.visible is request.bias is None) else None


class _Native(torch.autograd.Function):
    """Saves inputs, output and lse; the backward pass recomputes the weights from them.

    The output that is saved is not rounded to half precision: the backward pass would have to compute it once more. Nor
    is lse rounded to float32, which would be a relative error of all weights as large as the last digit of lse.
    """

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call = call.without_tensors()
        ctx.set_materialize_grads(False)
        lse = empty_lse(call.query)
        exact = forward(request_of(call), lse, torch.float32)
        ctx.save_for_backward(exact, lse, *inputs)
        return exact.to(call.query.dtype), lse.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, *inputs = ctx.saved_tensors

        def own() -> list[Tensor | None]:
            call, (of_output, of_lse) = ctx.call.with_tensors(*inputs), gradients
            return native_gradients(call, output, lse, of_output, of_lse, ctx.needs_input_grad)

        return backward_pass(ctx, gradients, inputs, own, reference_results(ctx.call))


def native_gradients(
    call: AttentionCall,
    output: Tensor,
    lse: Tensor,
    output_gradient: Tensor | None,
    lse_gradient: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of a call's inputs from its results and theirs; `needed` ends with whether each bias wants one."""
    request = request_of(call)
    if output_gradient is None:
        output_gradient = torch.zeros_like(output, dtype=call.query.dtype)
    biases = len(call.bias_tensors)
    wanted = [index for index in range(biases) if needed[index - biases]]
    shape = learnt_shape(call) if wanted else None
    bias_gradient = None if shape is None else output.new_zeros(shape, dtype=torch.float32)
    *found, correction = backward(request, output, lse, output_gradient, lse_gradient, bias_gradient)
    if call.sinks is not None:
        found.append(sinks_gradient(call.sinks, correction, lse))
    of_biases: list[Tensor | None] = [None] * biases
    if bias_gradient is not None:
        bias = call.bias_tensors[wanted[0]]
        of_biases[wanted[0]] = bias_gradient.view(bias.shape).to(bias.dtype)
    return [*found, *of_biases]
