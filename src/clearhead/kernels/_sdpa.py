"""PyTorch's own fused kernels, through `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call.call import Call, Results
from .._call.heads import fold_group, unfold_group
from .._call.layout import Layout, has_contiguous_rows
from ..masks._bound import BoundMask
from ..masks._lowering import additive, hides_nothing, is_plain_causal, touched_share
from ._base import Backend, Kernel, Plan, Refusal, applicable, of_rows, refusals_of_half, refusals_of_heads
from ._gathered import gathers
from ._sdpa_backend import FusedCall, backend_of, fits_a_kernel, is_fused, name_of
from ._sdpa_sequences import gives_lse, plan_batch, plan_sequences, refusals_of_sequences
from ._sdpa_sinks import Options, attend_with_sinks, refusals_of_sinks

Grouping = Literal["none", "kernel", "rows", "calls"]

_FEW_ROWS = 16  # from 32 rows on, folding a group of heads into the rows gains nothing
_WORTH_SKIPPING = 1 << 22  # scores that take milliseconds, which pays for finding out what can be skipped
_CPU_SHARE, _OTHER_SHARE = 1 / 3, 1 / 16
_ALIGNED = 8
_NO_FUSED_KERNEL = "PyTorch has no fused kernel for this call and would build (B, H, L, S)"


@final
class SdpaKernel(Kernel):
    """FlashAttention, memory-efficient or cuDNN attention, whichever PyTorch picks; never its unfused path."""

    name: ClassVar[str] = "sdpa"
    twice_differentiable: ClassVar[bool] = False
    seeds_dropout: ClassVar[bool] = False
    isolates_queries: ClassVar[bool] = True
    #: `torch.nn.attention.varlen`, on CUDA devices.
    takes_packed: ClassVar[bool] = True
    formula: ClassVar[frozenset[str]] = frozenset({"sinks", "row_sinks"})

    def refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        if layout.sequences is not None:
            return tuple(refusals_of_sequences(layout, bound, layout.same_sequences))
        causal_nan = layout.scale <= 0 and _is_flagged_causal(layout, bound)
        reasons = applicable(
            {
                "PyTorch does not give out the log-sum-exp": layout.lse and not gives_lse(layout, bound),
                "its causal path gives NaN for a scale of 0 or below": causal_nan,
                "each process would drop different weights": layout.is_part,
                "a size is 0": layout.empty,
                "its fused kernels give no gradient for a bias": layout.learns_bias,
                "torch.func cannot transform it twice, or derive it forwards": layout.transformed,
            }
        )
        if layout.tracing or layout.symbolic:
            dims = layout.query[3], layout.value[3]
            if layout.device.type == "cuda" and not fits_a_kernel(layout.dtype, *dims, masked=layout.masked):
                reasons.append(Refusal(_NO_FUSED_KERNEL))
        elif not layout.lse:
            reasons += _reasons_of_values(layout, bound)
            if not reasons and not is_fused(_fused_call(layout, bound)):
                reasons.append(Refusal(_NO_FUSED_KERNEL))
        if layout.sinks and not reasons:
            reasons += refusals_of_sinks(layout, name_of(_fused_call(layout, bound)))
        return tuple(reasons)

    def backend(self, layout: Layout, bound: BoundMask) -> Backend | None:
        if layout.device.type == "cpu" or layout.tracing:
            return None
        packed = layout.sequences is not None or layout.lse
        return Backend("varlen") if packed else backend_of(_fused_call(layout, bound))

    def plan(self, layout: Layout, bound: BoundMask) -> Plan:
        if layout.sequences is not None:
            return plan_sequences(layout, bound)
        if layout.lse:
            return plan_batch(layout, bound)
        group, grouping = layout.group, _grouping(layout, bound)
        folded, split = grouping == "rows", grouping == "calls"
        grouped: dict[str, bool] = {"enable_gqa": True} if grouping == "kernel" else {}
        is_causal, hides = False, not hides_nothing(bound)
        if hides and _is_flagged_causal(layout, bound):
            is_causal, hides = True, False  # not the comparison, which is a symbol while tracing
        may_interleave = layout.tracing or any(1 in strides[:-1] for strides in layout.strides)
        fused = None
        if layout.sinks:
            fused = Options(name_of(_fused_call(layout, bound)), layout.dropout_p, is_causal, layout.scale)

        def compute(call: Call) -> Results:
            query, key, value = call.query, call.key, call.value
            if may_interleave:
                query, key, value = map(_dense_rows, (query, key, value))
            if folded:
                query = fold_group(query, key.shape[1])
            lowered = _lower(call, group if folded else 1) if hides else None
            sinks = None if call.sinks is None else _sinks_of_rows(call.sinks, call, folded)

            def attend(query: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
                if fused is not None and sinks is not None:
                    return attend_with_sinks(fused, query, key, value, bias, sinks)
                return F.scaled_dot_product_attention(
                    query, key, value, bias, layout.dropout_p, is_causal, scale=layout.scale, **grouped
                )

            operands = query, lowered, sinks
            output = _attend_split(attend, *operands, group=group) if split else attend(*operands)
            if folded:
                output = unfold_group(output, call.query.shape[1])  # (B, H, L, Dv)
            masked = call.coverage.masked_queries if hides else None
            if masked is not None:
                # In place where that is allowed: the copy would lay heads out anew. Graphs do not depend on gradients.
                copied = call.layout.tracing or output.requires_grad
                output = output.masked_fill(masked, 0) if copied else output.masked_fill_(masked, 0)
            return Results(output)

        return compute


def _attend_split(attend: Callable[..., Tensor], query: Tensor, *others: Tensor | None, group: int) -> Tensor:
    """A call for the first head of every group, one for the second, and so on. Each takes the keys as they are.

    What broadcasts over heads is the same in each call.
    """

    def of_calls(x: Tensor | None) -> Sequence[Tensor | None]:
        return (x,) * group if x is None or x.shape[1] == 1 else x.unflatten(1, (-1, group)).unbind(2)

    calls = zip(*map(of_calls, (query, *others)), strict=True)  # (B, Hkv, L, D) each
    return torch.stack([attend(*each) for each in calls], 2).flatten(1, 2)


def _sinks_of_rows(sinks: Tensor, call: Call, folded: bool) -> Tensor:
    """The sinks of a kernel's rows: (1 or B, H, 1 or L), or (1 or B, Hkv, G·L) where the heads of a group are rows."""
    sinks = of_rows(sinks)
    if not folded:
        return sinks
    rows = sinks.unflatten(1, (-1, call.layout.group))  # (1 or B, Hkv, G, 1 or L)
    return rows.expand(-1, -1, -1, call.query.shape[2]).flatten(2)


def _dense_rows(tensor: Tensor) -> Tensor:
    """PyTorch's CPU kernel allocates with `torch.empty_like`, and writes as if its rows had no gaps.

    They have some for tensors that overlap themselves, such as those of `Tensor.unfold`, whose rows are contiguous.
    """
    if 1 not in tensor.stride()[:-1] or tensor.shape[-1] == 1:
        return tensor
    return tensor if torch.empty_like(tensor, device="meta").stride(-1) == 1 else tensor.contiguous()


def _reasons_of_values(layout: Layout, bound: BoundMask) -> list[Refusal]:
    """Reasons that depend on sizes, on the device or on what the mask shows, none of which a traced graph may read."""
    reasons = refusals_of_half(layout)
    if hides_nothing(bound) or _is_flagged_causal(layout, bound):
        return reasons
    reasons += refusals_of_heads(bound)
    share = share_worth_skipping(bound)
    if share is not None:
        reasons.append(Refusal("the mask leaves {share:.0%} of the scores, and it would compute all", share=share))
    if bound.grid.has_values and gathers(bound):
        reasons.append(Refusal("few keys are selected, and it would compute all"))
    return reasons


def _fused_call(layout: Layout, bound: BoundMask, grouping: Grouping | None = None) -> FusedCall:
    """What PyTorch chooses its kernel by, from the mask's dtype and none of its work."""
    causal, dtype = _is_flagged_causal(layout, bound), None
    if not causal and not hides_nothing(bound):
        dtype = layout.compute_dtype if bound.has_bias and layout.device.type == "cpu" else layout.dtype
    shapes = (layout.query, layout.key, layout.value)
    whole_rows = tuple(map(has_contiguous_rows, shapes, layout.strides))
    grouping = grouping or _grouping(layout, bound)
    if grouping == "calls":
        shapes = ((layout.query[0], layout.key[1], *layout.query[2:]), layout.key, layout.value)
    options = (layout.dropout_p > 0, bool(layout.gradients), causal, grouping == "rows")
    return FusedCall(shapes, whole_rows, layout.dtype, layout.device, dtype, *options)


def _grouping(layout: Layout, bound: BoundMask) -> Grouping:
    """How the heads of a group share keys: in the kernel, as rows of one head, or as calls of their own.

    With few rows PyTorch's own grouping reads every key once per query head. While tracing only one row is looked for:
    any other comparison would tie the graph to a length. On GPUs no kernel takes grouped heads in float32, and with a
    mask only cuDNN does. Rows need the mask once for each head of a group, and sum gradients in float32.
    """
    if layout.group == 1:
        return "none"
    length, is_float = layout.query[2], layout.dtype == torch.float32
    on_cuda = layout.device.type == "cuda"
    if layout.tracing:
        return "rows" if length == 1 else "calls" if on_cuda and is_float else "kernel"
    is_causal = _is_flagged_causal(layout, bound)
    if length <= _FEW_ROWS and not is_causal:
        return "rows"
    if not on_cuda or is_fused(_fused_call(layout, bound, "kernel")):
        return "kernel"
    return "calls" if is_causal or (is_float and bound.mask is not None) else "rows"


def _fold_mask(mask: Tensor, call: Call) -> Tensor:
    """(1 or B, 1 or H, 1 or L, 1 or S) → (1 or B, 1 or Hkv, 1 or G·L, 1 or S)."""
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return mask
    group = call.layout.group
    heads = mask.unflatten(1, (-1, group)) if mask.shape[1] != 1 else mask[:, :, None]  # (…, 1 or G, 1 or L, …)
    rows = heads.expand(-1, -1, group, call.query.shape[2], -1)
    return rows.flatten(2, 3)


def share_worth_skipping(bound: BoundMask) -> float | None:
    """Which part of the scores a mask leaves, if another kernel had better skip the rest; else ``None``.

    `benchmarks.cpu.window` measures where `chunked` overtakes on a CPU; on accelerators its many small steps cost more.
    """
    grid = bound.grid
    if grid.batch_size * grid.num_heads * grid.query_length * grid.key_length < _WORTH_SKIPPING:
        return None
    share = bound.once("touched share", lambda: touched_share(bound))
    return share if share <= (_CPU_SHARE if grid.device.type == "cpu" else _OTHER_SHARE) else None


def _is_flagged_causal(layout: Layout, bound: BoundMask) -> bool:
    """Whether PyTorch's causal flag says what the mask says. Not for one row of grouped heads: these become rows."""
    if layout.group > 1 and layout.query[2] == 1:
        return False
    return is_plain_causal(bound)


def _lower(call: Call, group: int) -> Tensor | None:
    """The mask as one tensor that broadcasts, for heads whose groups are folded into the rows."""
    return call.bound.form(("sdpa", call.query.dtype, group), lambda: _lower_tensor(call, group))


def _lower_tensor(call: Call, group: int) -> Tensor | None:
    """A bias in which hidden keys are −∞.

    Fully masked rows are unmasked here, and their output is set to zero later. PyTorch's kernels then compute no
    empty softmax.
    """
    masked, dtype = call.coverage.masked_queries, call.query.dtype
    visible, bias = additive(call.bound, call.layout.compute_dtype)
    if visible is not None and masked is not None:
        visible = visible | masked
    if bias is not None:
        lowered = bias if bias.is_cpu else _rounded(bias, dtype)
        if visible is not None:
            lowered = torch.where(visible, lowered, float("-inf"))
        if masked is not None:
            lowered = lowered.masked_fill(masked, 0)
    elif visible is None:
        return None
    elif call.layout.tracing:  # a graph is smaller with a bool tensor
        lowered = visible
    elif visible.is_cpu:
        lowered = torch.where(visible, visible.new_zeros((), dtype=dtype), float("-inf"))
    else:
        lowered = visible.to(dtype).log_()  # log 1 = 0 and log 0 = −∞, in two operators
    return _with_whole_rows(lowered if group == 1 else _fold_mask(lowered, call), call.key.shape[2])


def _rounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in the dtype of the query: PyTorch's kernels for accelerators take no other.

    A number beyond the dtype's range stays finite, because −∞ would hide the key.
    """
    if bias.dtype == dtype or torch.finfo(dtype).max >= torch.finfo(bias.dtype).max / 2:
        return bias.to(dtype)
    limits = torch.finfo(dtype)
    return torch.where(bias == float("-inf"), bias, bias.clamp(limits.min, limits.max)).to(dtype)


def _with_whole_rows(mask: Tensor, keys: int) -> Tensor:
    """The mask with the numbers of a row side by side, and rows that begin at multiples of 8 numbers.

    Without the first PyTorch has no fused kernel but on the CPU. Without the second it copies the mask in each call.
    Broadcast dimensions stay broadcast.
    """
    steps = mask.stride()[:3]
    if mask.is_cpu or (mask.shape[3] == keys and mask.stride(3) == 1 and not any(step % _ALIGNED for step in steps)):
        return mask
    distinct = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in steps)]
    distinct = distinct.expand(-1, -1, -1, keys)
    aligned = F.pad(distinct, (0, -keys % _ALIGNED)) if keys % _ALIGNED else distinct.contiguous()
    return aligned[..., :keys].expand(*mask.shape[:3], keys)
