"""PyTorch's own fused kernels, through `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call.spec import AttentionCall
from .._environment import is_tracing, is_transformed
from ..masks._base import Mask
from ..masks._grid import Grid
from ..masks._lowering import additive, differs_between_heads, hides_nothing, is_plain_causal, touched_share
from ._base import Kernel, Plan, Refusal, rows_interleave

__all__ = ["SdpaKernel"]

_HALF = (torch.bfloat16, torch.float16)
_FEW_ROWS = 16  # from 32 rows on, folding a group of heads into the rows gains nothing
_WORTH_SKIPPING = 1 << 22  # scores that take milliseconds, which pays for finding out what can be skipped
_CPU_SHARE, _OTHER_SHARE = 1 / 3, 1 / 16
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
        if call.scale <= 0 and _is_flagged_causal(call):
            reasons.append(Refusal("its causal path gives NaN for a scale of 0 or below"))
        if call.sinks is not None:
            reasons.append(Refusal("it has no sinks"))
        if 0 in call.query.shape or 0 in call.value.shape or 0 in call.key.shape:
            reasons.append(Refusal("a size is 0"))
        if any(tensor.requires_grad for tensor in call.bias_tensors) and torch.is_grad_enabled():
            reasons.append(Refusal("its fused kernels give no gradient for a bias"))
        if is_transformed():
            reasons.append(Refusal("torch.func cannot transform it twice, or derive it forwards"))
        if not is_tracing():
            reasons += _reasons_of_values(call)
            if not reasons and not _has_fused_kernel(call):
                reasons.append(Refusal("PyTorch has no fused kernel for this call and would build (B, H, L, S)"))
        return tuple(reasons)

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        mask, is_causal = _lower(call)
        folded = _folds(call)
        query = _fold_query(call) if folded else call.query
        query, key, value = map(_dense_rows, (query, call.key, call.value))
        # A branch, because a traced comparison is no bool.
        grouped = {"enable_gqa": True} if call.group > 1 and not folded else {}
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=is_causal,
            scale=call.scale,
            **grouped,
        )
        if folded:
            output = output.reshape(*call.query.shape[:3], call.value.shape[-1])  # (B, H, L, Dv)
        if call.reach.masked_queries is not None:
            output = output.masked_fill(call.reach.masked_queries, 0)
        return output, None

    def prepare(self, call: AttentionCall) -> Plan:
        mask, is_causal = _lower(call)
        interleaved = any(map(rows_interleave, (call.query, call.key, call.value)))
        if mask is not None or call.group > 1 or call.dropout_p > 0 or interleaved:
            return super().prepare(call)
        attend, scale = F.scaled_dot_product_attention, call.scale
        return lambda query, key, value, _mask: attend(query, key, value, None, 0.0, is_causal, scale=scale)


def _dense_rows(tensor: Tensor) -> Tensor:
    """PyTorch's CPU kernel allocates with `torch.empty_like` and writes rows without gaps."""
    return tensor.contiguous() if rows_interleave(tensor) else tensor


def _reasons_of_values(call: AttentionCall) -> list[Refusal]:
    """Reasons that depend on sizes, on the device or on what the mask shows, none of which a traced graph may read."""
    reasons: list[Refusal] = []
    if call.query.device.type == "cpu" and call.query.dtype in _HALF:
        reasons.append(Refusal("on the CPU it rounds weights to half precision, which can more than double the error"))
    mask, grid = call.mask, call.grid
    if mask is None or hides_nothing(mask, grid) or _is_flagged_causal(call):
        return reasons
    if mask.lowered(grid, "differs between heads", lambda: differs_between_heads(mask, grid)):
        reasons.append(Refusal("the mask differs between heads and would have to be built whole, (B, H, L, S)"))
    share = mask.lowered(grid, "share worth skipping", lambda: _share_worth_skipping(mask, grid))
    if share is not None:
        reasons.append(Refusal("the mask leaves {share:.0%} of the scores, and it would compute all", share=share))
    return reasons


def _has_fused_kernel(call: AttentionCall) -> bool:
    """Whether PyTorch would take one of its fused paths; a prepared mask holds the answers."""
    if call.mask is None:
        return _is_fused(call)
    tensors = call.query, call.key, call.value
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    shapes = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
    key = "fused", call.query.dtype, call.dropout_p > 0, gradients, shapes
    return call.mask.lowered(call.grid, key, lambda: _is_fused(call))


def _is_fused(call: AttentionCall) -> bool:
    """Which of its paths PyTorch would take for this call, from the real mask's dtype but none of its work."""
    causal, folded = _is_flagged_causal(call), _folds(call)
    query = _fold_query(call) if folded else call.query
    mask = None
    if call.mask is not None and not causal and not hides_nothing(call.mask, call.grid):
        shape = (*query.shape[:3], call.grid.key_length)
        dtype = call.compute_dtype if call.mask.has_bias else call.query.dtype
        mask = torch.empty(1, dtype=dtype, device=call.query.device).expand(shape)
    choice = torch._fused_sdp_choice(  # pyright: ignore
        query,
        call.key,
        call.value,
        mask,
        call.dropout_p,
        causal,
        scale=call.scale,
        enable_gqa=call.group > 1 and not folded,
    )
    return choice != _MATH


def _folds(call: AttentionCall) -> bool:
    """Whether the heads of a group become rows of one head.

    With few rows PyTorch's own grouping reads every key once per query head. While tracing only one row is asked for:
    any other comparison would tie the graph to a length.
    """
    if call.group == 1:
        return False
    length = call.query.shape[2]
    if is_tracing():
        return length == 1
    return length <= _FEW_ROWS and not _is_flagged_causal(call)


def _fold_query(call: AttentionCall) -> Tensor:
    return call.query.reshape(call.key.shape[0], call.key.shape[1], -1, call.query.shape[-1])  # (B, Hkv, G·L, D)


def _fold_mask(mask: Tensor, call: AttentionCall) -> Tensor:
    """(1 or B, 1 or H, 1 or L, 1 or S) → (1 or B, 1 or Hkv, 1 or G·L, 1 or S)."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask
    heads = mask.unflatten(1, (-1, call.group)) if mask.shape[1] != 1 else mask[:, :, None]  # (…, 1 or G, 1 or L, …)
    rows = heads.expand(-1, -1, call.group, call.query.shape[2], -1)
    return rows.flatten(2, 3)


def _share_worth_skipping(mask: Mask, grid: Grid) -> float | None:
    """Which part of the scores a mask leaves, if another kernel had better skip the rest; else ``None``.

    `benchmarks.window` measures where `chunked` overtakes on a CPU; on accelerators its many small steps cost more.
    """
    if grid.batch_size * grid.num_heads * grid.query_length * grid.key_length < _WORTH_SKIPPING:
        return None
    share = touched_share(mask, grid)
    return share if share <= (_CPU_SHARE if grid.device.type == "cpu" else _OTHER_SHARE) else None


def _is_flagged_causal(call: AttentionCall) -> bool:
    """Whether PyTorch's causal flag says what the mask says. One row is folded, and told to each row of its group."""
    if call.group > 1 and call.query.shape[2] == 1:
        return False
    return is_plain_causal(call.mask, call.grid)


def _lower(call: AttentionCall) -> tuple[Tensor | None, bool]:
    """The mask as PyTorch takes it: nothing, the causal flag, or one tensor that broadcasts."""
    mask, grid = call.mask, call.grid
    if mask is None or hides_nothing(mask, grid):
        return None, False
    if _is_flagged_causal(call):
        return None, True
    group = call.group if _folds(call) else 1
    return mask.lowered(grid, ("sdpa", call.query.dtype, group), lambda: _lower_tensor(mask, call, group)), False


def _lower_tensor(mask: Mask, call: AttentionCall, group: int) -> Tensor | None:
    """A bias in which hidden keys are −∞, for heads whose groups are folded into the rows.

    Queries that see no key are opened to all of them here and their output zeroed afterwards: no kernel then meets
    an empty softmax, forward or backward.
    """
    masked = call.reach.masked_queries
    visible, found = additive(mask, call.grid, call.compute_dtype)
    if visible is not None and found is None and is_tracing():  # a graph is smaller with a bool tensor
        found = visible if masked is None else visible | masked
    elif visible is not None:
        if masked is not None:
            visible = visible | masked
        nothing = visible.new_zeros((), dtype=call.query.dtype) if found is None else found
        found = torch.where(visible, nothing, float("-inf"))
    if found is not None and masked is not None and found.dtype != torch.bool:
        found = found.masked_fill(masked, 0)
    return found if found is None or group == 1 else _fold_mask(found, call)
