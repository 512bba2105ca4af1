"""Packed sequences on PyTorch's flash attention for variable lengths, `torch.nn.attention.varlen`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import Call, Results
from .._call.layout import Layout
from .._call.sequences import PackedSequences
from ..masks._bound import BoundMask
from ..masks._structure import Band
from ._base import Plan, Refusal, applicable
from ._second_order import without_second_derivatives

_LARGEST_HEAD = 256
_HALF = (torch.float16, torch.bfloat16)


def refusals_of_sequences(layout: Layout, bound: BoundMask, same_lengths: bool) -> list[Refusal]:
    """Every reason against packed sequences, whose queries and keys may have the same lengths."""
    dim, value_dim = layout.query[3], layout.value[3]
    fits = dim <= _LARGEST_HEAD and dim % 8 == 0 and value_dim == dim
    reasons = {
        "PyTorch has packed sequences on CUDA devices only": layout.device.type != "cuda",
        "of packed sequences PyTorch takes float16 and bfloat16 only": layout.dtype not in _HALF,
        "of packed sequences PyTorch takes D = Dv only, a multiple of 8 up to 256": not fits,
        "of packed sequences it takes no soft-cap": layout.softcap is not None,
        "of packed sequences it takes no sinks": layout.sinks,
        "of packed sequences it takes no dropout": layout.dropout_p > 0,
        "of packed sequences PyTorch gives no gradient of the log-sum-exp": layout.lse and bool(layout.gradients),
        "of packed sequences PyTorch takes the masks causal() and sliding_window(…) only, in self-attention": (
            _window(layout, bound, same_lengths) is None
        ),
        "a size is 0": layout.empty,
        "torch.func cannot transform it twice, or derive it forwards": layout.transformed,
        "a graph cannot hold it": layout.tracing,
    }
    return applicable(reasons)


def is_one_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether packed sequences on a CUDA device, without a mask or dropout, run in one kernel."""
    return dtype in _HALF and head_dim <= _LARGEST_HEAD and head_dim % 8 == 0


def plan_sequences(layout: Layout, bound: BoundMask) -> Plan:
    """All sequences in one kernel, which reads no mask."""
    attend = _attend(layout, _window(layout, bound, layout.same_sequences))

    def compute(call: Call) -> Results:
        sequences = cast(PackedSequences, call.sequences)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))  # (T, H, D)
        if layout.gradients:
            query, key, value = without_second_derivatives(query, key, value)
        output, lse = attend(query, key, value, *sequences.int32, *(sequences.longest or sequences.tokens))
        return Results(output.transpose(0, 1)[None], None if lse is None else lse[None])

    return compute


def gives_lse(layout: Layout, bound: BoundMask) -> bool:
    """Whether a batch without padding runs as packed sequences, whose kernel returns the log-sum-exp."""
    if layout.device.type != "cuda" or layout.tracing:  # a graph must not depend on the lengths
        return False
    return not refusals_of_sequences(layout, bound, layout.query[2] == layout.key[2])


def plan_batch(layout: Layout, bound: BoundMask) -> Plan:
    """A batch without padding and its log-sum-exp: each item is a sequence."""
    attend = _attend(layout, _window(layout, bound, layout.query[2] == layout.key[2]))

    def compute(call: Call) -> Results:
        (batch, _, length, _), keys = call.query.shape, call.key.shape[2]
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))  # (B·L, H, D)
        bounds = [
            torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=query.device)
            for count in (length, keys)
        ]
        output, lse = attend(query, key, value, *bounds, length, keys)
        by_item = cast(Tensor, lse).unflatten(1, (batch, length)).transpose(0, 1)  # (B, H, L)
        return Results(output.unflatten(0, (batch, length)).transpose(1, 2), by_item)

    return compute


def _attend(layout: Layout, window: tuple[int, int] | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """PyTorch's function, which returns (T, H, D), and the log-sum-exp (H, T) if `layout.lse` is set."""
    varlen: Any = import_module("torch.nn.attention.varlen")
    options: dict[str, Any] = {"scale": layout.scale, "window_size": window}
    if layout.lse:
        options["return_aux"] = varlen.AuxRequest(lse=True)
    if layout.group > 1:
        options["enable_gqa"] = True

    def attend(query: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        results = varlen.varlen_attn(query, *others, **options)
        return (results[0], _lse(results[1], query)) if layout.lse else (results, None)

    return attend


def _lse(lse: Tensor, query: Tensor) -> Tensor:
    """(H, T), with −∞ where a sequence has no key."""
    tokens, heads, _ = query.shape
    # The documentation says (T, H); the kernel, and PyTorch's own description of it for graphs, say (H, T).
    by_head = lse if lse.shape == (heads, tokens) else lse.t()
    return by_head.masked_fill(by_head == float("inf"), float("-inf"))


def _window(layout: Layout, bound: BoundMask, same_lengths: bool) -> tuple[int, int] | None:
    """How many keys before and after its own position a query sees, −1 for all; ``None`` for other masks."""
    if bound.mask is None:
        return -1, -1
    band, grid = bound.band, bound.grid
    # PyTorch aligns windows at the last key of each sequence, Clearhead at the first: they agree for equal lengths.
    if band is not None and layout.sequences is None and band.shows_all(grid):
        return -1, -1
    if band is None or not same_lengths or band.low > 0 or band.high < 0 or band.stop < grid.key_length:
        return None
    widest = Band.whole(grid)
    return -1 if band.low <= widest.low + 1 else -band.low, -1 if band.high >= widest.high - 1 else band.high
