"""Packed sequences on PyTorch's flash attention for variable lengths, `torch.nn.attention.varlen`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import AttentionCall, Results
from .._call.sequences import PackedSequences
from .._call.spec import AttentionSpec
from ..masks._base import Mask
from ..masks._grid import Grid
from ..masks._structure import Band, structure_of
from ._base import Plan, Refusal, applicable
from ._second_order import without_second_derivatives

_LARGEST_HEAD = 256
_HALF = (torch.float16, torch.bfloat16)


def refusals_of_sequences(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
    """Every reason against packed sequences."""
    return tuple(_refusals(spec, mask, grid, spec.same_sequences))


def _refusals(spec: AttentionSpec, mask: Mask | None, grid: Grid, same_lengths: bool) -> list[Refusal]:
    dim, value_dim = spec.query[3], spec.value[3]
    fits = dim <= _LARGEST_HEAD and dim % 8 == 0 and value_dim == dim
    reasons = {
        "PyTorch has packed sequences on CUDA devices only": spec.device.type != "cuda",
        "of packed sequences PyTorch takes float16 and bfloat16 only": spec.dtype not in _HALF,
        "of packed sequences PyTorch takes D = Dv only, a multiple of 8 up to 256": not fits,
        "of packed sequences it takes no soft-cap": spec.softcap is not None,
        "of packed sequences it takes no sinks": spec.sinks,
        "of packed sequences it takes no dropout": spec.dropout_p > 0,
        "of packed sequences PyTorch gives no gradient of the log-sum-exp": spec.lse and bool(spec.gradients),
        "of packed sequences PyTorch takes the masks causal() and sliding_window(…) only, in self-attention": (
            _window(spec, mask, grid, same_lengths) is None
        ),
        "a size is 0": spec.empty,
        "torch.func cannot transform it twice, or derive it forwards": spec.transformed,
        "a graph cannot hold it": spec.tracing,
    }
    return applicable(reasons)


def is_one_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether packed sequences on a CUDA device, without a mask or dropout, run in one kernel."""
    return dtype in _HALF and head_dim <= _LARGEST_HEAD and head_dim % 8 == 0


def plan_sequences(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> Plan:
    """All sequences in one kernel, which reads no mask."""
    attend = _attend(spec, _window(spec, mask, grid, spec.same_sequences))

    def compute(call: AttentionCall) -> Results:
        sequences = cast(PackedSequences, call.request.sequences)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))  # (T, H, D)
        if spec.gradients:
            query, key, value = without_second_derivatives(query, key, value)
        output, lse = attend(query, key, value, *sequences.int32, *(sequences.longest or sequences.tokens))
        return Results(output.transpose(0, 1)[None], None if lse is None else lse[None])

    return compute


def gives_lse(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> bool:
    """Whether a batch without padding runs as packed sequences, whose kernel returns the log-sum-exp."""
    if spec.device.type != "cuda" or spec.tracing:  # a graph must not depend on the lengths
        return False
    return not _refusals(spec, mask, grid, grid.query_length == grid.key_length)


def plan_batch(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> Plan:
    """A batch without padding and its log-sum-exp: each item is a sequence."""
    attend = _attend(spec, _window(spec, mask, grid, grid.query_length == grid.key_length))

    def compute(call: AttentionCall) -> Results:
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


def _attend(spec: AttentionSpec, window: tuple[int, int] | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """PyTorch's function, which returns (T, H, D), and the log-sum-exp (H, T) if `spec.lse` is set."""
    varlen: Any = import_module("torch.nn.attention.varlen")
    options: dict[str, Any] = {"scale": spec.scale, "window_size": window}
    if spec.lse:
        options["return_aux"] = varlen.AuxRequest(lse=True)
    if spec.group > 1:
        options["enable_gqa"] = True

    def attend(query: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        results = varlen.varlen_attn(query, *others, **options)
        return (results[0], _lse(results[1], query)) if spec.lse else (results, None)

    return attend


def _lse(lse: Tensor, query: Tensor) -> Tensor:
    """(H, T), with −∞ where a sequence has no key."""
    tokens, heads, _ = query.shape
    # The documentation says (T, H); the kernel, and PyTorch's own description of it for graphs, say (H, T).
    by_head = lse if lse.shape == (heads, tokens) else lse.t()
    return by_head.masked_fill(by_head == float("inf"), float("-inf"))


def _window(spec: AttentionSpec, mask: Mask | None, grid: Grid, same_lengths: bool) -> tuple[int, int] | None:
    """How many keys before and after its own position a query sees, −1 for all; ``None`` for other masks."""
    if mask is None:
        return -1, -1
    band = structure_of(mask, grid).only_band(grid)
    # PyTorch aligns windows at the last key of each sequence, Clearhead at the first: they agree for equal lengths.
    if band is not None and spec.sequences is None and band.shows_all(grid):
        return -1, -1
    if band is None or not same_lengths or band.low > 0 or band.high < 0 or band.stop < grid.key_length:
        return None
    widest = Band.whole(grid)
    return -1 if band.low <= widest.low + 1 else -band.low, -1 if band.high >= widest.high - 1 else band.high
