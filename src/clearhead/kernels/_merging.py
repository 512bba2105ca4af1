"""Attention to some of the keys of a larger call: its results merged, and its gradients from those of all keys."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import Call, valid_call, zero_hidden
from .._environment import autocast_off
from ._chunked import chunked_gradients
from ._flex import FlexKernel
from ._flex_choice import leaves_to_flex
from ._native import native_gradients_of_some_keys
from ._native_support import native_refusals


def merge_some_keys(output: Tensor, lse: Tensor, added: Tensor, added_lse: Tensor) -> None:
    """Add keys to those that an output and its lse are of, in place.

    ::

        o ← o + σ(lse' − lse) (o' − o),   lse ← log(exp lse + exp lse')

    Neither formula can overflow.

    Args:
        output: (…, Dv), in the compute dtype.
        lse: (…), in the compute dtype, −∞ without keys.
        added, added_lse: output and lse of the added keys, which broadcast.
    """
    share = torch.sigmoid(added_lse - lse).nan_to_num_(0.0)  # of −∞ − −∞: neither has a key
    output.lerp_(added.to(output.dtype), share[..., None].to(output.dtype))
    torch.logaddexp(lse, added_lse.to(lse.dtype), out=lse)


def merge_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add the sinks (H,) to the keys that an output (B, H, L, Dv) and its lse (B, H, L) are of, in place."""
    nothing = output.new_zeros(()).expand(output.shape)
    merge_some_keys(output, lse, nothing, sinks.to(lse.dtype)[None, :, None].expand(lse.shape))


def gradients_of_some_keys(
    call: Call, output: Tensor, lse: Tensor, correction: Tensor, output_gradient: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and, if one `learns`, of every bias tensor.

    Args:
        call: has some of the keys, and no sinks.
        output, lse: over all keys, in the compute dtype.
        correction: δ = dO·o (B, H, L) over all keys.
        output_gradient: dO.
        learns: whether a bias needs its gradient.
    """
    if not learns and not native_refusals(call.layout, call.bound):
        return native_gradients_of_some_keys(call, output, lse.double().contiguous(), output_gradient)
    if not learns and _runs_on_flex(call):
        return _flex_gradients(call, lse, correction, output_gradient)
    gradients = chunked_gradients(zero_hidden(call), lse, output_gradient, None, correction)
    return gradients if learns else gradients[:3]


def _runs_on_flex(call: Call) -> bool:
    """Whether `flex` returns this call's log-sum-exp, and takes its gradient."""
    layout = call.layout._replace(lse=True, gradients=(True,) * 3)
    return bool(leaves_to_flex(layout, call.bound))


def _flex_gradients(call: Call, lse: Tensor, correction: Tensor, output_gradient: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key and value through the output o' and the lse' of these keys.

    The output of all keys is the sum of w o' with w = exp(lse' − lse) over its parts, so ``dO' = w dO`` and
    ``dlse' = w (dO·o' − δ)``.
    """
    hidden = zero_hidden(call)
    query, key, value = leaves = [x.detach().requires_grad_() for x in (hidden.query, hidden.key, hidden.value)]
    with torch.inference_mode(False), torch.enable_grad(), autocast_off(call.query):
        options: dict[str, Any] = {**call.options, "lse": True}
        part = valid_call(Call(query, key, value, **options))
        results = FlexKernel().plan(part.layout, part.bound)(part)
        output, part_lse = results.output, cast(Tensor, results.lse)
    share = (part_lse.detach() - lse).exp().nan_to_num_(0.0)  # of −∞ − −∞: the query has no key
    of_output = (output_gradient * share[..., None]).to(output.dtype)
    # By the rounded gradient, whose product with o' the kernel subtracts.
    of_lse = torch.linalg.vecdot(of_output.to(lse.dtype), output.detach().to(lse.dtype)) - share * correction
    return torch.autograd.grad((output, part_lse), leaves, (of_output, of_lse))
