"""The spec of a call: everything about it but its tensors, the key of a cached plan."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .._checks import PLAIN, flag, number
from .._environment import Environment
from ..masks._base import Mask
from .request import Request, WeightsWanted

_INTEGER_OR_FLOAT = (float, int)


class Layout(NamedTuple):
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tensor.stride())

    @property
    def has_whole_rows(self) -> bool:
        """Whether the elements of a row lie side by side."""
        return self.strides[-1] == 1 or self.shape[-1] <= 1


# A tuple and no dataclass: it is made, hashed and compared in every call.
class AttentionSpec(NamedTuple):
    """Everything about a call but its tensors: hashable, the key of a cached plan.

    Args:
        query: layout of (B, H, L, D).
        key: of (B, Hkv, S, D).
        value: of (B, Hkv, S, Dv).
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
        in_larger: whether the call drops the weights of a larger call: it has a seed or an offset.
        gradients: which of the call's inputs need one, in the order of `AttentionCall.inputs`; empty if none does.
        lse: whether the log-sum-exp is returned.
        weights: which weights are returned.
        documents: how many packed sequences there are, or ``None``.
        tracing, transformed, dispatching: of the environment.
    """

    query: Layout
    key: Layout
    value: Layout
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
    in_larger: bool
    gradients: tuple[bool, ...]
    lse: bool
    weights: WeightsWanted
    documents: int | None
    tracing: bool
    transformed: bool
    dispatching: bool

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 stays float64; everything else is scored and accumulated in float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def needs_gradients(self) -> bool:
        return bool(self.gradients)

    @property
    def learns_bias(self) -> bool:
        """Whether a tensor that the mask adds to the scores needs a gradient."""
        return any(self.gradients[3 + self.sinks :])

    @property
    def empty(self) -> bool:
        """Whether a dimension is empty."""
        return 0 in self.query.shape or 0 in self.key.shape or 0 in self.value.shape

    @property
    def can_be_cached(self) -> bool:
        """Whether equal specs are planned alike."""
        # A subclass may hold what no spec does, sizes of a graph are symbols, and a mask without a signature may be
        # another one in the next call.
        return self.subclass is None and not self.tracing and (self.mask is not None or not self.masked)


def spec_of(query: Tensor, key: Tensor, value: Tensor, request: Request, environment: Environment) -> AttentionSpec:
    """The spec of a call whose operands `read_operands` has read; its sizes and numbers need not be valid yet."""
    tracing, sinks, dropout_p = environment.tracing, request.sinks, request.dropout_p
    mask = cast("Mask | None", request.mask)
    plain = type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN
    return AttentionSpec(
        _layout(query, tracing),
        _layout(key, tracing),
        _layout(value, tracing),
        query.dtype,
        query.device,
        None if plain else next(type(x).__name__ for x in (query, key, value) if type(x) not in PLAIN),
        not tracing and (query.is_neg() or key.is_neg() or value.is_neg()),
        None if mask is None or tracing else mask.signature(),
        mask is not None,
        _key_of(request.query_positions),
        _key_of(request.key_positions),
        _scale(request.scale, query.shape[3]),
        None if request.softcap is None else _float("softcap", request.softcap, "a number > 0, or None"),
        sinks is not None,
        dropout_p
        if type(dropout_p) in _INTEGER_OR_FLOAT
        else _float("dropout_p", dropout_p, "a probability in [0, 1]"),
        # Without dropout they would only keep equal calls from sharing a plan.
        bool(dropout_p) and (request.seed is not None or request.offset is not None),
        _gradients(query, key, value, sinks, mask) if environment.gradients else (),
        request.lse if type(request.lse) is bool else flag("return_lse", request.lse),
        request.weights,
        None if request.rows is None else request.rows.count,
        tracing,
        environment.transformed,
        environment.dispatching,
    )


def _layout(tensor: Tensor, tracing: bool) -> Layout:
    # In a graph strides are symbols, which a comparison would tie to these strides.
    return Layout(tensor.shape, () if tracing else tensor.stride())


def _key_of(positions: Tensor | int | None) -> tuple[int, ...] | int | None:
    return tuple(positions.shape) if isinstance(positions, Tensor) else positions


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        # Sums of no products are 0, whatever the factor.
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    return scale if type(scale) is float else _float("scale", scale, "a finite number, or None for 1/√D")


def _float(name: str, value: float, expected: str) -> float:
    """A number as a float. `validate` checks its range, which is in the spec."""
    return value if type(value) is float else number(name, value, expected, lambda _: True)


def _gradients(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Mask | None) -> tuple[bool, ...]:
    inputs = (query, key, value, *(() if sinks is None else (sinks,)), *(() if mask is None else mask.bias_tensors()))
    # Where no input needs one, calls with and without `no_grad` share a plan.
    wanted = tuple([tensor.requires_grad for tensor in inputs])
    return wanted if True in wanted else ()
