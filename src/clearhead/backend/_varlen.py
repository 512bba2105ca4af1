"""`torch.nn.attention.varlen` on the CPU, where PyTorch has no kernel of its own.

PyTorch's alignment holds: within a sequence the last query is at the last key, as in FlashAttention. Where a sequence
has as many queries as keys, that is the same as Clearhead's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._call.saved import restored
from .._call.sequences import PackedSequences, read_sequences
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ..kernels._native_arguments import DTYPES, NativeArguments, contiguous_strides
from ..kernels._native_plan import NativePlan, plan_of
from ..kernels._native_returned import CPU
from ._layouts import strides_like


class _Window(NamedTuple):
    """How many keys before and after its own position a query sees, and −1 for all of them."""

    left: int
    right: int

    @classmethod
    def of(cls, is_causal: bool, window_size: Sequence[int] | None) -> _Window:
        left, right = window_size or (-1, -1)
        return cls(left, 0 if is_causal else right)

    @property
    def is_open(self) -> bool:
        return self.left < 0 and self.right < 0

    def band(self, shift: int) -> dict[str, int | None]:
        """By the names of `NativeArguments`, if query i is at position i + shift."""
        low = None if self.left < 0 else shift - self.left
        return {"low": low, "high": None if self.right < 0 else shift + self.right}


_ALL = slice(None)


class _Part(NamedTuple):
    """Sequences that one call of the kernel computes, and where their tokens are among all."""

    queries: slice
    keys: slice
    arguments: NativeArguments


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (T, H, D), the log-sum-exp (H, T), and the state of a generator, which nothing reads."""
    if block_table is not None or seqused_k is not None:
        key, value, cu_seq_k = _used(key, value, cu_seq_k, seqused_k, block_table)
    _require_tensors(query, key, value)
    sequences = _sequences(query, key, cu_seq_q, cu_seq_k)
    computed = [_computed(part) for part in _parts(query, key, value, sequences, is_causal, window_size, scale)]
    output, lse = computed[0] if len(computed) == 1 else _joined(query, computed)
    return output, lse, torch.zeros(2, dtype=torch.uint64)


def _forward_out(out: Tensor, *arguments: Any) -> Tensor:
    """Write the output (T, H, D) to `out`. The result is the log-sum-exp (H, T)."""
    output, lse, _ = _forward(*arguments)
    out.copy_(output)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    (tokens, heads, dim), dtype = grad_out.shape, grad_out.dtype
    query = restored("saved query", query, grad_out.shape, dtype, CPU)
    key = restored("saved key", key, (*key.shape[:2], dim), dtype, CPU)
    value = restored("saved value", value, key.shape, dtype, CPU)
    out = restored("saved output", out, grad_out.shape, dtype, CPU)
    lse = restored("saved log-sum-exp", lse, (heads, tokens), torch.float32, CPU)
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    sequences = _sequences(query, key, cu_seq_q, cu_seq_k)
    for part in _parts(query, key, value, sequences, is_causal, window_size, scale):
        contiguous = tuple(contiguous_strides(tensor.shape) for tensor in part.arguments[:3])
        plan = plan_of(part.arguments, differentiable=True, gradients=contiguous)
        output, exact = _exact(plan, part, out, lse)
        of_output = grad_out[part.queries].transpose(0, 1)[None]  # (1, H, T, D)
        computed = plan.backward(part.arguments, output, exact, of_output)[:3]
        for gradient, places, of_part in zip(gradients, (part.queries, part.keys, part.keys), computed, strict=True):
            gradient[places] = of_part[0].transpose(0, 1)
    return gradients[0], gradients[1], gradients[2]


KERNELS: dict[str, Any] = {
    "_varlen_attn": _forward,
    "_varlen_attn_out": _forward_out,
    "_varlen_attn_backward": _backward,
}


def _computed(part: _Part) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), laid out as the queries, and the log-sum-exp (H, T)."""
    query = part.arguments.query
    plan = plan_of(part.arguments, output=strides_like(query.shape, query.stride()))
    exact = plan.empty_lse(query)
    return plan.forward(part.arguments, exact).squeeze(0).transpose(0, 1), exact.squeeze(0).float()


def _joined(query: Tensor, computed: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The parts together, the output laid out as the queries."""
    outputs, sums = zip(*computed, strict=True)
    return torch.cat(outputs, out=torch.empty_like(query)), torch.cat(sums, dim=1)


def _exact(plan: NativePlan, part: _Part, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output in float32 and the log-sum-exp in float64, computed again where the output was rounded."""
    if out.dtype == torch.float32:
        output = out[part.queries].transpose(0, 1)[None]  # (1, H, T, D)
        return output, lse[None, :, part.queries].double().contiguous()
    exact = plan.empty_lse(out)
    return plan.forward(part.arguments, exact), exact


def _require_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        expected = f"one of {', '.join(str(dtype) for dtype in DTYPES)}, the same for key and value"
        got = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise DTypeError("query", expected=expected, got=got)
    if query.dim() != 3 or key.shape != value.shape or query.shape[2] != key.shape[-1]:
        got = ", ".join(shape_text(tensor.shape) for tensor in (query, key, value))
        raise ShapeError("query, key, value", expected="(T, H, D), (Tk, Hkv, D), (Tk, Hkv, D)", got=got)


def _sequences(query: Tensor, key: Tensor, cu_seq_q: Tensor | None, cu_seq_k: Tensor | None) -> PackedSequences:
    if cu_seq_q is None or cu_seq_k is None:
        raise ArgumentError("cu_seq_k", expected="boundaries, unless there is a block_table", got="None")
    same = query.shape[0] == key.shape[0] and (cu_seq_k is cu_seq_q or torch.equal(cu_seq_q, cu_seq_k))
    return read_sequences(cu_seq_q, cu_seq_q if same else cu_seq_k, query, key)


def _parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    is_causal: bool,
    window_size: Sequence[int] | None,
    scale: float | None,
) -> Iterator[_Part]:
    """All sequences at once; one by one if the last query of some is not at its last key by itself."""
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    window = _Window.of(is_causal, window_size)
    tensors = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]  # (1, H, T, D)
    if window.is_open or sequences.queries == sequences.keys or not len(query):
        boundaries = {"cu_seqlens_q": sequences.cu_seqlens_q, "cu_seqlens_k": sequences.cu_seqlens_k}
        yield _Part(_ALL, _ALL, NativeArguments(*tensors, scale=scale, **boundaries, **window.band(0)))
        return
    for rows, keys in sequences.slices():
        if rows.start < rows.stop:
            operands = [tensor[:, :, part] for tensor, part in zip(tensors, (rows, keys, keys), strict=True)]
            band = window.band(_count(keys) - _count(rows))
            yield _Part(rows, keys, NativeArguments(*operands, scale=scale, **band))


def _count(tokens: slice) -> int:
    return tokens.stop - tokens.start


def _used(
    key: Tensor, value: Tensor, cu_seq_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values that are in use, end to end, and their boundaries.

    Without a `block_table` a sequence uses the first of its keys. With one, its keys are those of its pages.
    """
    if seqused_k is None:
        raise ArgumentError("seqused_k", expected="the number of keys of each sequence, with a block_table", got="None")
    if block_table is None:
        bounds = _sequences(key, key, cu_seq_k, cu_seq_k).keys
        rooms = [torch.arange(start, stop) for start, stop in pairwise(bounds)]
    else:
        size = key.shape[1]
        key, value = key.flatten(0, 1), value.flatten(0, 1)  # (pages · size, Hkv, D)
        rooms = [(row.long()[:, None] * size + torch.arange(size)).flatten() for row in block_table]
    used: list[int] = seqused_k.tolist()
    if len(used) != len(rooms) or not all(0 <= count <= len(room) for count, room in zip(used, rooms, strict=True)):
        expected = f"a number of keys for each of {len(rooms)} sequences, within {[*map(len, rooms)]}"
        raise ArgumentError("seqused_k", expected=expected, got=str(used))
    chosen = torch.cat([room[:count] for room, count in zip(rooms, used, strict=True)])
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(key):
        got = str([] if block_table is None else block_table.tolist())
        raise ArgumentError("block_table", expected="numbers of pages that exist, where keys are used", got=got)
    return key[chosen], value[chosen], torch.tensor([0, *used]).cumsum(0)
