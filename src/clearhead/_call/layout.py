"""The layout of a call: everything about it but its tensors, the key of a cached plan."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._checks import PLAIN, flag, number
from .._environment import Environment

if TYPE_CHECKING:
    from .call import Call

_NUMBERS = (float, int)


# A tuple and no dataclass: it is made, hashed and compared in every call.
class Layout(NamedTuple):
    """Everything about a call but its tensors: hashable, the key of a cached plan.

    Args:
        query, key, value: their shapes (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        strides: of these three; empty while tracing.
        dtype, device: of all three.
        subclass: name of the tensor subclass among them, or ``None``.
        negative: whether one of them is a lazily negated view.
        mask: the mask's signature; ``None`` without a mask, and for one that has no signature.
        masked: whether there is a mask.
        query_positions, key_positions: ``None``, an int, or the shape of a tensor.
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
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    subclass: str | None
    negative: bool
    mask: Hashable | None
    masked: bool
    query_positions: int | tuple[int, ...] | None
    key_positions: int | tuple[int, ...] | None
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


def layout_of(call: Call, environment: Environment | Layout) -> Layout:
    """The layout of a call. Its sizes and numbers need not be valid yet.

    Args:
        call: with sinks and positions as kernels read them.
        environment: of the call. For a call that is made from another one, the layout of that call, which holds it.
    """
    query, key, value, mask, sequences = call.query, call.key, call.value, call.mask, call.sequences
    scale, softcap, dropout_p, lse = call.scale, call.softcap, call.dropout_p, call.lse
    q_positions, k_positions = call.query_positions, call.key_positions
    tracing, shape = environment.tracing, query.shape
    if scale is None:  # sums of no products are 0, whatever the factor
        scale = 1.0 / math.sqrt(shape[3]) if shape[3] else 1.0
    plain = type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN
    return Layout(
        shape,
        key.shape,
        value.shape,
        # In a graph strides are symbols, which a comparison would tie to these strides.
        () if tracing else (query.stride(), key.stride(), value.stride()),
        query.dtype,
        query.device,
        None if plain else next(type(x).__name__ for x in (query, key, value) if type(x) not in PLAIN),
        not tracing and (query.is_neg() or key.is_neg() or value.is_neg()),
        None if mask is None or tracing else mask.signature(),
        mask is not None,
        q_positions.shape if isinstance(q_positions, Tensor) else q_positions,
        k_positions.shape if isinstance(k_positions, Tensor) else k_positions,
        scale if type(scale) is float else _float("scale", scale, "a finite number, or None for 1/√D"),
        None if softcap is None else _float("softcap", softcap, "a number > 0, or None"),
        call.sinks is not None,
        dropout_p if type(dropout_p) in _NUMBERS else _float("dropout_p", dropout_p, "a probability in [0, 1]"),
        # Without dropout, seed and offset would only keep equal calls from sharing a plan. A packed sequence has an
        # offset, but its call lies in a larger one only if the call of all sequences does.
        bool(dropout_p)
        and (call.seed is not None or call.offset is not None)
        and (not isinstance(environment, Layout) or environment.is_part),
        _gradients(call) if environment.gradients else (),
        lse if lse is False or lse is True else flag("return_lse", lse),
        call.weights,
        None if sequences is None else sequences.count,
        sequences is not None and sequences.cu_seqlens_q is sequences.cu_seqlens_k,
        tracing,
        environment.transformed,
        environment.dispatching,
    )


def has_contiguous_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements of a row lie side by side."""
    return strides[-1] == 1 or shape[-1] <= 1


def _float(name: str, value: float, expected: str) -> float:
    """A number as a float. `validate` checks its range, which is in the layout."""
    return value if type(value) is float else number(name, value, expected, lambda _: True)


def _gradients(call: Call) -> tuple[bool, ...]:
    # Where no input needs one, calls with and without `no_grad` share a plan.
    wanted = tuple([tensor.requires_grad for tensor in call.inputs])
    return wanted if True in wanted else ()
