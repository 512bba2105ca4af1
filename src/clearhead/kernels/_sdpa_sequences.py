"""Packed sequences on PyTorch's flash attention for variable lengths, `torch.nn.attention.varlen`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
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

_MODULE = "torch.nn.attention.varlen"
_LARGEST_HEAD = 256
_HALF = (torch.float16, torch.bfloat16)


def refusals_of_sequences(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
    """Every reason against packed sequences."""
    dim, value_dim = spec.query[3], spec.value[3]
    fits = dim <= _LARGEST_HEAD and dim % 8 == 0 and value_dim == dim
    reasons = {
        "PyTorch has packed sequences on CUDA devices only": spec.device.type != "cuda",
        "this version of PyTorch has no torch.nn.attention.varlen": not _has_module(),
        "of packed sequences PyTorch takes float16 and bfloat16 only": spec.dtype not in _HALF,
        "of packed sequences PyTorch takes D = Dv only, a multiple of 8 up to 256": not fits,
        "of packed sequences it takes no soft-cap": spec.softcap is not None,
        "of packed sequences it takes no sinks": spec.sinks,
        "of packed sequences it takes no dropout": spec.dropout_p > 0,
        "of packed sequences PyTorch gives no gradient of the log-sum-exp": spec.lse and bool(spec.gradients),
        "of packed sequences PyTorch takes the masks causal() and sliding_window(…) only, in self-attention": (
            _window(spec, mask, grid, spec.same_sequences) is None
        ),
        "a size is 0": spec.empty,
        "torch.func cannot transform it twice, or derive it forwards": spec.transformed,
        "a graph cannot hold it": spec.tracing,
    }
    return tuple(applicable(reasons))


def is_one_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether packed sequences on a CUDA device, without a mask or dropout, run in one kernel."""
    return _has_module() and dtype in _HALF and head_dim <= _LARGEST_HEAD and head_dim % 8 == 0


@functools.cache
def _has_module() -> bool:
    return find_spec(_MODULE) is not None  # a search in folders, which calls must not repeat


def plan_sequences(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> Plan:
    """All sequences in one kernel, which reads no mask."""
    varlen: Any = import_module(_MODULE)
    window = cast("tuple[int, int]", _window(spec, mask, grid, spec.same_sequences))
    results_wanted = varlen.AuxRequest(lse=True) if spec.lse else None
    grouped: dict[str, bool] = {"enable_gqa": True} if spec.group > 1 and _asks_for_groups(varlen.varlen_attn) else {}

    def compute(call: AttentionCall) -> Results:
        sequences = cast(PackedSequences, call.request.sequences)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))  # (T, H, D)
        if spec.gradients:
            query, key, value = without_second_derivatives(query, key, value)
        returned = varlen.varlen_attn(
            query,
            key,
            value,
            *sequences.int32,
            *(sequences.longest or sequences.tokens),
            return_aux=results_wanted,
            scale=spec.scale,
            window_size=window,
            **grouped,
        )
        output, lse = returned if spec.lse else (returned, None)
        return Results(output.transpose(0, 1)[None], None if lse is None else _lse(lse, query))

    return compute


def gives_lse(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> bool:
    """Whether a batch without padding runs as packed sequences, whose kernel returns the log-sum-exp."""
    if spec.device.type != "cuda" or spec.gradients or spec.tracing or spec.transformed or spec.empty:
        return False
    dim, value_dim = spec.query[3], spec.value[3]
    if not is_one_kernel(spec.dtype, dim) or value_dim != dim or spec.softcap is not None or spec.sinks:
        return False
    return spec.dropout_p == 0 and _window(spec, mask, grid, grid.query_length == grid.key_length) is not None


def plan_batch(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> Plan:
    """A batch without padding and its log-sum-exp: each item is a sequence."""
    varlen: Any = import_module(_MODULE)
    window = cast("tuple[int, int]", _window(spec, mask, grid, grid.query_length == grid.key_length))
    grouped: dict[str, bool] = {"enable_gqa": True} if spec.group > 1 and _asks_for_groups(varlen.varlen_attn) else {}

    def compute(call: AttentionCall) -> Results:
        (batch, _, length, _), keys = call.query.shape, call.key.shape[2]
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))  # (B·L, H, D)
        bounds = [
            torch.arange(0, (batch + 1) * count, count, dtype=torch.int32, device=query.device)
            for count in (length, keys)
        ]
        aux = varlen.AuxRequest(lse=True)
        options: dict[str, Any] = {"return_aux": aux, "scale": spec.scale, "window_size": window, **grouped}
        output, lse = varlen.varlen_attn(query, key, value, *bounds, length, keys, **options)
        by_item = _lse(lse, query)[0].unflatten(1, (batch, length)).transpose(0, 1)  # (B, H, L)
        return Results(output.unflatten(0, (batch, length)).transpose(1, 2), by_item)

    return compute


def _asks_for_groups(attend: Callable[..., Any]) -> bool:
    """PyTorch 2.11 has no such argument. It takes grouped heads as they are."""
    return "enable_gqa" in signature(attend).parameters


def _lse(lse: Tensor, query: Tensor) -> Tensor:
    """(1, H, T), with −∞ where a sequence has no key."""
    tokens, heads, _ = query.shape
    # The documentation says (T, H); the kernel, and PyTorch's own description of it for graphs, say (H, T).
    by_head = lse if lse.shape == (heads, tokens) else lse.t()
    return by_head.masked_fill(by_head == float("inf"), float("-inf"))[None]


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
