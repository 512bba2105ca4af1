"""The layout of a call: everything about it but its tensors, the key of a cached plan."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._checks import PLAIN

Placed = tuple[tuple[int, ...], tuple[int, ...]]  #: shape and strides of a tensor
#: The optional parts of the formula, by their names in `Call`.
FORMULA = ("softcap", "sinks", "row_sinks")
_STRIDED = torch.strided


class Layout(NamedTuple):
    """Everything about a call but its tensors, from which kernels are chosen and plans made.

    Args:
        query, key, value: their shapes (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        strides: of these three; empty while tracing.
        dtype, device: of all three.
        subclass: name of the tensor subclass among them, or ``None``.
        negative: whether one of them is a lazily negated view.
        masked: whether there is a mask.
        scale: factor of q·k.
        softcap: c in s ← c·tanh(s/c), or ``None``.
        sinks: whether there are sinks.
        dropout_p: probability that a weight is dropped, in [0, 1].
        is_part: whether the call drops the weights of a larger call: it has a seed or an offset.
        gradients: which of the call's inputs need one, in the order of `Call.inputs`; empty if none does.
        lse: whether the log-sum-exp is returned.
        weights: which weights are returned, as in `Call`.
        sequences: how many packed sequences there are, or ``None``.
        same_sequences: whether their queries and keys have the same boundaries.
        tracing, transformed, dispatching: of the environment.
        merged: whether the operands have no dimension of heads. Shapes and strides here are as if they had.
        formula: which of `FORMULA` the call has. A kernel that does not declare one refuses the call.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    subclass: str | None
    negative: bool
    masked: bool
    scale: float
    softcap: float | None
    sinks: bool
    dropout_p: float
    is_part: bool
    gradients: tuple[bool, ...]
    lse: bool
    weights: str | None
    sequences: int | None
    same_sequences: bool
    tracing: bool
    transformed: bool
    dispatching: bool
    merged: bool = False
    formula: frozenset[str] = frozenset()

    @property
    def reads_merged(self) -> bool:
        """Whether a kernel can read merged operands in place, and the results besides the output have no rows in it."""
        whole_rows = all(strides[3] == 1 for strides in self.strides)
        return whole_rows and self.weights is None and not self.dispatching

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of query, key and value as they are."""
        shapes = self.query, self.key, self.value
        return tuple((b, n, h * d) for b, h, n, d in shapes) if self.merged else shapes

    @property
    def operand_strides(self) -> tuple[tuple[int, ...], ...]:
        """The strides of query, key and value as they are."""
        return tuple((b, n, one) for b, _, n, one in self.strides) if self.merged else self.strides

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query[1] // self.key[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 stays float64; everything else is scored and accumulated in float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def learns_bias(self) -> bool:
        """Whether a tensor that the mask adds to the scores needs a gradient."""
        return any(self.gradients[3 + self.sinks :])

    @property
    def symbolic(self) -> bool:
        """Whether sizes are symbols, as while tracing and with `make_fx`."""
        return any(isinstance(size, torch.SymInt) for size in (*self.query, *self.key, *self.value))

    @property
    def empty(self) -> bool:
        """Whether a dimension is empty."""
        return 0 in self.query or 0 in self.key or 0 in self.value


def layout_of(call: Any) -> Layout:
    """The layout of a call that was read. Its sizes and numbers need not be valid yet."""
    query, key, value, mask, sequences = call.query, call.key, call.value, call.mask, call.sequences
    scale, environment = call.scale, call.environment
    operands, tracing = (query, key, value), environment.tracing
    query_shape, key_shape, value_shape = (x.shape for x in operands)
    # In a graph strides are symbols, which a comparison would tie to these strides.
    strides = () if tracing else tuple([x.stride() for x in operands])
    if call.heads is not None:
        (num_heads, num_kv_heads), sizes = call.heads, zip((query_shape, key_shape, value_shape), strides, strict=True)
        counts = num_heads, num_kv_heads, num_kv_heads
        placed = [with_heads(each, heads) for each, heads in zip(sizes, counts, strict=True)]
        (query_shape, key_shape, value_shape), strides = zip(*placed, strict=True)
    if scale is None:  # sums of no products are 0, whatever the factor
        scale = 1.0 / math.sqrt(query_shape[3]) if query_shape[3] else 1.0
    kinds = [type(x).__name__ for x in operands if type(x) not in PLAIN]
    return Layout(
        query_shape,
        key_shape,
        value_shape,
        strides,
        query.dtype,
        query.device,
        kinds[0] if kinds else None,
        not tracing and any(x.is_neg() for x in operands),
        mask is not None,
        scale,
        call.softcap,
        call.sinks is not None,
        call.dropout_p,
        bool(call.dropout_p) and _is_part(call),
        gradients_of(call) if environment.gradients else (),
        call.lse,
        call.weights,
        None if sequences is None else sequences.count,
        sequences is not None and sequences.cu_seqlens_q is sequences.cu_seqlens_k,
        tracing,
        environment.transformed,
        environment.dispatching,
        call.heads is not None,
        frozenset([name for name in FORMULA if getattr(call, name) is not None]),
    )


def key_of(call: Any) -> tuple[object, ...] | None:
    """What determines the plan of a call besides its mask; ``None`` if the plan is not cached.

    The number of keys counts only beside gradients and weights, whose sizes it determines: with a cache it grows from
    call to call. Kernels that are chosen by it have it, and positions, in the key of the mask.
    """
    # A subclass may hold what no key does, and sizes of a graph are symbols.
    if call.environment.tracing or not all(type(x) in PLAIN for x in (call.query, call.key, call.value)):
        return None
    return plain_key_of(call)


def plain_key_of(call: Any) -> tuple[object, ...]:
    """`key_of` a call of plain tensors outside of graphs."""
    environment, query, key, value = call.environment, call.query, call.key, call.value
    gradients = gradients_of(call) if environment.gradients else ()
    weights, sequences, dropout_p = call.weights, call.sequences, call.dropout_p
    of_key, of_value = key.shape, value.shape
    keys = of_key[-2]
    return (
        query.shape,
        query.stride(),
        of_key[0],
        of_key[-3],
        of_key[-1],
        key.stride(),
        value.stride(),
        of_value == of_key or (of_value[0], of_value[-3], of_value[-1], of_value[-2] == keys),
        keys if gradients or weights is not None else 0,
        query.dtype,
        query.dtype is key.dtype is value.dtype,
        # Devices take longer to compare.
        (query.is_cpu and key.is_cpu and value.is_cpu) or (query.device, key.device, value.device),
        query.layout is key.layout is value.layout is _STRIDED,
        query.is_neg() or key.is_neg() or value.is_neg(),
        call.heads,
        call.scale,
        call.softcap,
        dropout_p,
        call.lse,
        weights,
        None if call.sinks is None else call.sinks.dim(),
        gradients,
        None if sequences is None else (sequences.count, sequences.cu_seqlens_q is sequences.cu_seqlens_k),
        environment.transformed,
        environment.dispatching,
        # Without dropout, seed and offset would only keep equal calls from sharing a plan.
        dropout_p and _is_part(call),
    )


def _is_part(call: Any) -> bool:
    """Whether a call drops the weights of a larger one, if it drops any."""
    # A packed sequence has an offset, but its call lies in a larger one only if the call of all sequences does.
    environment = call.environment
    in_larger = not isinstance(environment, Layout) or environment.is_part
    return in_larger and (call.seed is not None or call.offset is not None)


def with_heads(placed: Placed, heads: int) -> Placed:
    """Shape and strides of a merged tensor (B, n, H·D) as those of (B, H, n, D)."""
    (batch, rows, features), (item, row, one) = placed
    return (batch, heads, rows, features // heads), (item, features // heads * one, row, one)


def has_contiguous_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements of a row lie side by side."""
    return strides[-1] == 1 or shape[-1] <= 1


def gradients_of(call: Any) -> tuple[bool, ...]:
    """Which of the inputs of a call need a gradient; empty if none does."""
    # Where no input needs one, calls with and without `no_grad` share a plan.
    wanted = tuple([tensor.requires_grad for tensor in call.inputs])
    return wanted if True in wanted else ()
