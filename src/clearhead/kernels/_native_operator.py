"""The native kernel as operators of PyTorch, ``clearhead::attention`` and its backward, for graphs and dispatch modes.

Ordinary calls do not use them: the dispatcher costs more than a small attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from .._call.saved import layouts_of, restored_all
from .._torch_private import register_flop_formulas
from ._native_arguments import NativeArguments, contiguous_strides
from ._native_plan import plan_of
from ._native_returned import as_declared
from ._second_order import sinks_gradient

_IN_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    int: "SymInt",
    int | None: "SymInt?",
    Sequence[int] | None: "SymInt[]?",
}
_TYPES = {name: _IN_SCHEMA[hint] for name, hint in get_type_hints(NativeArguments).items()}
_REQUEST = ", ".join(f"{type_} {name}" for name, type_ in _TYPES.items())
_TENSORS = sum(type_.startswith("Tensor") for type_ in _TYPES.values())  # the first of the fields
_SAVED = *NativeArguments._fields[:_TENSORS], "output", "lse"
_library = torch.library.Library("clearhead", "FRAGMENT")
_library.define(f"attention({_REQUEST}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward({_REQUEST}, Tensor output, Tensor lse, Tensor output_gradient, Tensor? lse_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*request: Any) -> tuple[Tensor, Tensor]:
    arguments = NativeArguments(*request)
    plan = plan_of(arguments)
    lse = plan.empty_lse(arguments.query)
    return plan.forward(arguments, lse), lse


def _backward(*all_arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *request, output, lse, output_gradient, lse_gradient = all_arguments
    arguments = as_declared(NativeArguments(*request), output_gradient)
    contiguous = tuple(contiguous_strides(tensor.shape) for tensor in arguments[:3])
    plan = plan_of(arguments, differentiable=True, gradients=contiguous)
    if output.dtype != torch.float32:  # which is rounded
        output = plan.forward(arguments)
    return plan.backward(arguments, output, lse, output_gradient, lse_gradient)


def _empty_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float64)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length = query.shape[:3]
    shape = (batch, heads, length, value.shape[-1])
    # As `NativePlan` lays outputs out; computed anew, because strides of a graph may be symbols.
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, shape[-1]).transpose(1, 2), _empty_lse(query)
    return query.new_empty(shape), _empty_lse(query)


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    gradients = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return *gradients, _empty_lse(query).float()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = *inputs[:_TENSORS], *output
    ctx.save_for_backward(*tensors)
    ctx.layouts = layouts_of(tensors)
    ctx.numbers = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, output_gradient: Tensor | None, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    # Under create_graph=True another function has computed all gradients (`allow_second_derivatives`).
    if output_gradient is None and lse_gradient is None:
        return (None,) * len(NativeArguments._fields)
    *tensors, output, lse = restored_all(_SAVED, ctx.saved_tensors, ctx.layouts)
    if output_gradient is None:
        output_gradient = torch.zeros_like(output)
    call = NativeArguments(*cast(Any, tensors), *ctx.numbers)
    *gradients, correction = torch.ops.clearhead.attention_backward(*call, output, lse, output_gradient, lse_gradient)
    by_name: dict[str, Tensor] = dict(zip(("query", "key", "value"), gradients, strict=True))
    if call.sinks is not None:
        # The backward operator returns δ, and the gradient of the sinks is a sum of it.
        by_name["sinks"] = sinks_gradient(call.sinks, correction, lse)
    return tuple(by_name.get(name) for name in NativeArguments._fields)


def _forward_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Those of q·k and p·v for all pairs, as `torch.utils.flop_counter` counts attention, whatever a mask hides."""
    batch, heads, length, features = query
    return 2 * batch * heads * length * key[2] * (features + value[3])


def _backward_flops(*shapes: Any, **others: Any) -> int:
    """Two products for each of the forward pass. Scores that are computed again do not count."""
    return 2 * _forward_flops(*shapes, **others)


def count_flops() -> None:
    """Let the `FlopCounterMode`s that run count attention."""
    operators = torch.ops.clearhead
    register_flop_formulas({operators.attention: _forward_flops, operators.attention_backward: _backward_flops})


_library.impl("attention", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("clearhead::attention", _fake_forward, lib=_library)
torch.library.register_fake("clearhead::attention_backward", _fake_backward, lib=_library)
torch.library.register_autograd("clearhead::attention", _differentiate, setup_context=_save, lib=_library)
