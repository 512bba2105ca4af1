"""PyTorch's own fused kernels, through `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call.spec import AttentionCall, AttentionSpec, Layout, Results
from .._environment import fused_sdpa_choice
from ..masks._base import Mask
from ..masks._grid import Block
from ..masks._lowering import chosen_cell, hides_nothing, is_plain_causal, touched_share
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
    seeds_dropout: ClassVar[bool] = False

    def refusals(self, spec: AttentionSpec, mask: Mask | None) -> tuple[Refusal, ...]:
        reasons: list[Refusal] = []
        if spec.lse:
            reasons.append(Refusal("PyTorch does not give out the log-sum-exp"))
        if spec.softcap is not None:
            reasons.append(Refusal("it has no soft-cap"))
        if spec.scale <= 0 and _is_flagged_causal(spec, mask):
            reasons.append(Refusal("its causal path gives NaN for a scale of 0 or below"))
        if spec.sinks:
            reasons.append(Refusal("it has no sinks"))
        if spec.empty:
            reasons.append(Refusal("a size is 0"))
        if any(spec.gradients[3 + spec.sinks :]):
            reasons.append(Refusal("its fused kernels give no gradient for a bias"))
        if spec.transformed:
            reasons.append(Refusal("torch.func cannot transform it twice, or derive it forwards"))
        if not spec.tracing:
            reasons += _reasons_of_values(spec, mask)
            if not reasons and not _is_fused(spec, mask):
                reasons.append(Refusal("PyTorch has no fused kernel for this call and would build (B, H, L, S)"))
        return tuple(reasons)

    def plan(self, spec: AttentionSpec, mask: Mask | None) -> Plan:
        folded, group = _folds(spec, mask), spec.group
        grouped: dict[str, bool] = {"enable_gqa": True} if group > 1 and not folded else {}
        shape = (*spec.query.shape[:3], spec.value.shape[-1])

        def compute(call: AttentionCall) -> Results:
            lowered, is_causal = _lower(call)
            query, key, value = call.query, call.key, call.value
            if folded:
                query = _fold_query(call)
                lowered = None if lowered is None else _fold_mask(lowered, call)
            query, key, value = map(_dense_rows, (query, key, value))
            output = F.scaled_dot_product_attention(
                query, key, value, lowered, spec.dropout_p, is_causal, scale=spec.scale, **grouped
            )
            if folded:
                output = output.reshape(shape)  # (B, H, L, Dv)
            if call.coverage.queries is not None:
                output = output.masked_fill(~call.coverage.queries, 0)
            return Results(output)

        return compute


def _dense_rows(tensor: Tensor) -> Tensor:
    """PyTorch's CPU kernel allocates with `torch.empty_like` and writes rows without gaps."""
    return tensor.contiguous() if rows_interleave(tensor) else tensor


def _reasons_of_values(spec: AttentionSpec, mask: Mask | None) -> list[Refusal]:
    """Reasons that depend on sizes, on the device or on what the mask shows, none of which a traced graph may read."""
    reasons: list[Refusal] = []
    if spec.device.type == "cpu" and spec.dtype in _HALF:
        reasons.append(Refusal("on the CPU it rounds weights to half precision, which can more than double the error"))
    if mask is None or mask.is_tensor or _is_flagged_causal(spec, mask) or hides_nothing(mask, spec.grid):
        return reasons
    if _differs_between_heads(spec, mask):
        reasons.append(Refusal("the mask differs between heads and would have to be built whole, (B, H, L, S)"))
    share = _share_worth_skipping(spec, mask)
    if share is not None:
        reasons.append(Refusal("the mask leaves {share:.0%} of the scores, and it would compute all", share=share))
    return reasons


def _is_fused(spec: AttentionSpec, mask: Mask | None) -> bool:
    """Ask PyTorch which of its paths this call would take, with the mask's dtype and none of its work."""
    if fused_sdpa_choice is None:
        return False
    causal, folded = _is_flagged_causal(spec, mask), _folds(spec, mask)
    query, key, value = (_like(spec, layout) for layout in (spec.query, spec.key, spec.value))
    if folded:
        query = query.reshape(key.shape[0], key.shape[1], -1, query.shape[-1])
    lowered = None
    if mask is not None and not causal and not hides_nothing(mask, spec.grid):
        dtype = torch.bool if not mask.has_bias else spec.compute_dtype
        shape = (*query.shape[:3], spec.key.shape[2])
        lowered = torch.empty(1, dtype=dtype, device=spec.device).expand(shape)
    grouped = spec.group > 1 and not folded
    choice = fused_sdpa_choice(
        query, key, value, lowered, spec.dropout_p, causal, scale=spec.scale, enable_gqa=grouped
    )
    return choice != _MATH


def _like(spec: AttentionSpec, layout: Layout) -> Tensor:
    """A tensor of this shape and one row of memory, whose rows are contiguous if the layout's are."""
    contiguous = layout.strides[-1] == 1 or layout.shape[-1] <= 1
    row = torch.empty(
        layout.shape[-1] if contiguous else 1, dtype=spec.dtype, device=spec.device, requires_grad=spec.needs_gradients
    )
    return row.expand(layout.shape)


def _folds(spec: AttentionSpec, mask: Mask | None) -> bool:
    """Whether the heads of a group become rows of one head.

    With few rows PyTorch's own grouping reads every key once per query head. While tracing only one row is asked for:
    any other comparison would tie the graph to a length.
    """
    if spec.group == 1:
        return False
    length = spec.query.shape[2]
    if spec.tracing:
        return length == 1
    return length <= _FEW_ROWS and not _is_flagged_causal(spec, mask)


def _fold_query(call: AttentionCall) -> Tensor:
    return call.query.reshape(call.key.shape[0], call.key.shape[1], -1, call.query.shape[-1])  # (B, Hkv, G·L, D)


def _fold_mask(mask: Tensor, call: AttentionCall) -> Tensor:
    """(1 or B, 1 or H, 1 or L, 1 or S) → (1 or B, 1 or Hkv, 1 or G·L, 1 or S)."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask
    heads = mask.unflatten(1, (-1, call.group)) if mask.shape[1] != 1 else mask[:, :, None]  # (…, 1 or G, 1 or L, …)
    rows = heads.expand(-1, -1, call.group, call.query.shape[2], -1)
    return rows.flatten(2, 3)


def _share_worth_skipping(spec: AttentionSpec, mask: Mask) -> float | None:
    """Which part of the scores a mask leaves, if another kernel had better skip the rest; else ``None``.

    `benchmarks.window` measures where `chunked` overtakes on a CPU; on accelerators its many small steps cost more.
    """
    grid = spec.grid
    if grid.batch_size * grid.num_heads * grid.query_length * grid.key_length < _WORTH_SKIPPING:
        return None
    share = touched_share(mask, grid)
    return share if share <= (_CPU_SHARE if grid.device.type == "cpu" else _OTHER_SHARE) else None


def _differs_between_heads(spec: AttentionSpec, mask: Mask) -> bool:
    """Whether lowering would compute a mask of the size of the scores; one cell shows how it broadcasts."""
    if spec.empty:
        return False
    cell = chosen_cell(spec.grid)
    parts = (mask.visible(cell), mask.bias(cell, spec.compute_dtype))
    return any(part is not None and part.shape[1] > 1 for part in parts)


def _is_flagged_causal(spec: AttentionSpec, mask: Mask | None) -> bool:
    """Whether PyTorch's causal flag says what the mask says. One row is folded, and told to each row of its group."""
    if mask is None or (spec.group > 1 and spec.query.shape[2] == 1):
        return False
    return is_plain_causal(mask, spec.grid)


def _lower(call: AttentionCall) -> tuple[Tensor | None, bool]:
    """The mask as PyTorch takes it: nothing, the causal flag, or one tensor that broadcasts.

    Queries that see no key are opened to all of them here and their output zeroed afterwards: no kernel then meets
    an empty softmax, forward or backward.
    """
    if call.mask is None or hides_nothing(call.mask, call.grid):
        return None, False
    if _is_flagged_causal(call.spec, call.mask):
        return None, True
    block = Block(call.grid)
    visible, bias = call.mask.visible(block), call.mask.bias(block, call.compute_dtype)
    if bias is not None:
        if visible is not None:
            bias = bias.masked_fill(~visible, float("-inf"))
        if call.coverage.queries is not None:
            bias = bias.masked_fill(~call.coverage.queries, 0)
        return bias, False
    if visible is None:
        return None, False
    if call.coverage.queries is not None:
        visible = visible | ~call.coverage.queries
    return visible, False
