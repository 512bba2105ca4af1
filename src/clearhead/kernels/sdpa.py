"""PyTorch's own fused kernels, through `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import AttentionCall
from ..masks.grid import Block
from ..masks.lowering import is_plain_causal
from ..tracing import is_tracing, is_transformed
from .base import Kernel, Refusal

__all__ = ["SdpaKernel"]

_HALF = (torch.bfloat16, torch.float16)
_MATH = 0  # SDPBackend.MATH as `torch._fused_sdp_choice` numbers it


@final
class SdpaKernel(Kernel):
    """FlashAttention, memory-efficient or cuDNN attention, whichever PyTorch picks; never its unfused path."""

    name: ClassVar[str] = "sdpa"
    twice_differentiable: ClassVar[bool] = False

    def refusals(self, call: AttentionCall) -> tuple[Refusal, ...]:
        reasons: list[Refusal] = []
        if call.return_lse:
            reasons.append(Refusal("PyTorch does not give out the log-sum-exp"))
        if call.softcap is not None:
            reasons.append(Refusal("it has no soft-cap"))
        if call.scale <= 0 and is_plain_causal(call.mask, call.grid):
            reasons.append(Refusal("its causal path gives NaN for a scale of 0 or below"))
        if not is_tracing() and _needs_scores_of_mask(call):
            reasons.append(Refusal("the mask differs between heads and would have to be built whole, (B, H, L, S)"))
        if call.sinks is not None:
            reasons.append(Refusal("it has no sinks"))
        if 0 in call.query.shape or 0 in call.value.shape or 0 in call.key.shape:
            reasons.append(Refusal("a size is 0"))
        if any(tensor.requires_grad for tensor in call.bias_tensors) and torch.is_grad_enabled():
            reasons.append(Refusal("its fused kernels give no gradient for a bias"))
        if is_transformed():
            reasons.append(Refusal("torch.func cannot transform it twice"))
        if call.query.device.type == "cpu" and call.query.dtype in _HALF and not is_tracing():
            reasons.append(
                Refusal("on the CPU it rounds weights to half precision, which can more than double the error")
            )
        if not reasons and not is_tracing() and not _is_fused(call):
            reasons.append(Refusal("PyTorch has no fused kernel for this call and would build (B, H, L, S)"))
        return tuple(reasons)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        mask, is_causal = _lower(call)
        # A branch, because a traced comparison is no bool.
        grouped = {"enable_gqa": True} if call.group > 1 else {}
        output = F.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=is_causal,
            scale=call.scale,
            **grouped,
        )
        if call.reach.queries is not None:
            output = output.masked_fill(~call.reach.queries, 0)
        return output, None


def _is_fused(call: AttentionCall) -> bool:
    """Ask PyTorch which of its paths this call would take, with the real mask's dtype but none of its work."""
    causal = is_plain_causal(call.mask, call.grid)
    mask = None
    if call.mask is not None and not causal:
        dtype = torch.float32 if call.mask.has_bias and call.query.dtype != torch.float64 else None
        if call.mask.has_bias and dtype is None:
            dtype = torch.float64
        shape = (call.grid.batch_size, call.grid.num_heads, call.grid.query_length, call.grid.key_length)
        mask = torch.empty(1, dtype=dtype or torch.bool, device=call.query.device).expand(shape)
    choice = torch._fused_sdp_choice(  # pyright: ignore
        call.query,
        call.key,
        call.value,
        mask,
        call.dropout_p,
        causal,
        scale=call.scale,
        enable_gqa=call.group > 1,
    )
    return choice != _MATH


def _needs_scores_of_mask(call: AttentionCall) -> bool:
    """Whether lowering would compute a mask of the size of the scores; one corner shows how it broadcasts."""
    if call.mask is None or call.mask.is_tensor or 0 in call.query.shape or call.grid.key_length == 0:
        return False
    corner = Block(call.grid, rows=slice(0, 1), columns=slice(0, 1))
    parts = (call.mask.visible(corner), call.mask.bias(corner, call.compute_dtype))
    return any(part is not None and part.shape[1] > 1 for part in parts)


def _lower(call: AttentionCall) -> tuple[Tensor | None, bool]:
    """The mask as PyTorch takes it: nothing, the causal flag, or one tensor that broadcasts.

    Queries that see no key are opened to all of them here and their output zeroed afterwards: no kernel then meets
    an empty softmax, forward or backward.
    """
    if call.mask is None:
        return None, False
    if is_plain_causal(call.mask, call.grid):
        return None, True
    block = Block(call.grid)
    visible, bias = call.mask.visible(block), call.mask.bias(block, call.compute_dtype)
    if bias is not None:
        if visible is not None:
            bias = bias.masked_fill(~visible, float("-inf"))
        if call.reach.queries is not None:
            bias = bias.masked_fill(~call.reach.queries, 0)
        return bias, False
    if visible is None:
        return None, False
    if call.reach.queries is not None:
        visible = visible | ~call.reach.queries
    return visible, False
