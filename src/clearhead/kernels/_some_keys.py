"""Attention to some of the keys of a larger call: its results merged, and its gradients from those of all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .._call.call import AttentionCall, zero_hidden
from ._chunked import chunked_gradients
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
    call: AttentionCall, output: Tensor, lse: Tensor, correction: Tensor, output_gradient: Tensor, learns: bool
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and, if one `learns`, of every bias tensor.

    Args:
        call: has some of the keys, and no sinks.
        output, lse: over all keys, in the compute dtype.
        correction: δ = dO·o (B, H, L) over all keys.
        output_gradient: dO.
        learns: whether a bias needs its gradient.
    """
    if not learns and not native_refusals(call.spec, call.request.mask, call.grid):
        return native_gradients_of_some_keys(call, output, lse.double().contiguous(), output_gradient)
    gradients = chunked_gradients(zero_hidden(call), lse, output_gradient, None, correction)
    return gradients if learns else gradients[:3]
