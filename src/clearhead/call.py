"""One attention request, validated once and handed to kernels unchanged."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError, DeviceError, DTypeError, ShapeError, explain_problem, shape_text
from .masks.base import Mask
from .masks.check import as_positions
from .masks.grid import Grid
from .masks.lowering import Reach, reach
from .masks.tensors import as_mask

__all__ = ["AttentionCall", "build_call"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionCall:
    """What a kernel computes.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, S, D); Hkv divides H, query head h reads key/value head h // (H / Hkv).
        value: (B, Hkv, S, Dv).
        mask: still a description; kernels lower it. ``None`` hides nothing.
        scale: factor of q·k.
        softcap: c in s ← c·tanh(s/c), or ``None``.
        sinks: (H,) logits that take part in the softmax's denominator only, or ``None``.
        dropout_p: probability that a weight is dropped, in [0, 1].
        dropout_seed: int64 scalar; drawn once when a kernel of ours drops weights.
        return_lse: whether the log-sum-exp is wanted too.
        grid: sizes and positions for the mask.
        reach: queries and keys that take part at all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    return_lse: bool
    grid: Grid
    reach: Reach

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 stays float64; everything else is scored and accumulated in float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        return () if self.mask is None else self.mask.bias_tensors()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that gradients may be asked for."""
        sinks = () if self.sinks is None else (self.sinks,)
        return (self.query, self.key, self.value, *sinks, *self.bias_tensors)

    @property
    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)


def build_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    scale: float | None,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    return_lse: bool,
) -> AttentionCall:
    """Validate `attention`'s arguments (four-dimensional tensors) and cut out what cannot take part.

    Queries that see no key and keys that no query sees are set to zero here, so that NaN or inf stored in
    padding reaches neither outputs nor gradients, whatever the kernel.
    """
    _require_tensors(query=query, key=key, value=value)
    _require_shapes(query, key, value)
    _require_same(query, key, value)
    grid = Grid(
        query.shape[0],
        query.shape[1],
        query.shape[2],
        key.shape[2],
        query.device,
        _positions("query_positions", query_positions, query),
        _positions("key_positions", key_positions, key),
    )
    checked = None if mask is None else as_mask(mask)
    seen = Reach(None, None)
    if checked is not None:
        checked.validate(grid)
        seen = reach(checked, grid)
    if seen.queries is not None:
        query = query.masked_fill(~seen.queries, 0)
    if seen.keys is not None:
        seen_keys = _per_key_head(seen.keys, key.shape[1])
        key, value = key.masked_fill(~seen_keys, 0), value.masked_fill(~seen_keys, 0)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=checked,
        scale=_scale(scale, query),
        softcap=_softcap(softcap),
        sinks=_sinks(sinks, query),
        dropout_p=_dropout(dropout_p),
        dropout_seed=None,
        return_lse=return_lse,
        grid=grid,
        reach=seen,
    )


def _per_key_head(seen: Tensor, num_kv_heads: int) -> Tensor:
    """(1 or B, 1 or H, S, 1) → (1 or B, 1 or Hkv, S, 1): a key is read by every query head of its group."""
    if seen.shape[1] in (1, num_kv_heads):
        return seen
    return seen.unflatten(1, (num_kv_heads, -1)).any(2)


def _require_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DTypeError(explain_problem(name, expected="a torch.Tensor", got=type(tensor).__name__))
        if tensor.dtype not in FLOATS:
            raise DTypeError(
                explain_problem(
                    name,
                    expected="float64, float32, bfloat16 or float16",
                    got=str(tensor.dtype),
                    fix="Convert it, for example with .float().",
                )
            )


def _require_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ShapeError(
                explain_problem(
                    name,
                    expected="(B, H, L, D), or (H, L, D) for all three without a batch",
                    got=shape_text(tensor.shape),
                    fix="clearhead.split_heads turns (B, L, H·D) into (B, H, L, D).",
                )
            )
    batch, heads, _, head_dim = query.shape
    key_batch, kv_heads, key_length, key_dim = key.shape
    if key_batch != batch or value.shape[0] != batch:
        _mismatch("batch sizes", "B", query, key, value)
    if key_dim != head_dim:
        raise ShapeError(
            explain_problem(
                "key",
                expected=f"head_dim D = {head_dim} as in query {shape_text(query.shape)}",
                got=shape_text(key.shape),
            )
        )
    if value.shape[1] != kv_heads:
        _mismatch("key/value head counts", "Hkv", query, key, value)
    if value.shape[2] != key_length:
        _mismatch("key and value lengths", "S", query, key, value)
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            explain_problem(
                "key",
                expected=f"a head count that divides the query's H = {heads}",
                got=f"Hkv = {kv_heads} in {shape_text(key.shape)}",
                fix="Heads are the second dimension: (B, H, L, D), not (B, L, H, D).",
            )
        )


def _mismatch(what: str, symbol: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = ", ".join(
        f"{name} {shape_text(tensor.shape)}" for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    raise ShapeError(explain_problem("query, key, value", expected=f"equal {what} ({symbol})", got=shapes))


def _require_same(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise DTypeError(
                explain_problem(
                    name,
                    expected=f"query's dtype {query.dtype}",
                    got=str(tensor.dtype),
                    fix=f"Convert it with .to({query.dtype}).",
                )
            )
        if tensor.device != query.device:
            raise DeviceError(explain_problem(name, expected=f"query's device {query.device}", got=str(tensor.device)))


def _positions(name: str, positions: Tensor | None, tensor: Tensor) -> Tensor | None:
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        got = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise DTypeError(explain_problem(name, expected="an integer tensor (n,) or (B, n)", got=got))
    if positions.device != tensor.device:
        raise DeviceError(explain_problem(name, expected=f"device {tensor.device}", got=str(positions.device)))
    result = as_positions(name, positions)
    batch, length = tensor.shape[0], tensor.shape[2]
    if result.shape[0] not in (1, batch) or result.shape[1] != length:
        expected = f"shape ({length},) or ({batch}, {length})"
        raise ShapeError(explain_problem(name, expected=expected, got=shape_text(positions.shape)))
    return result.long()


def _scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        head_dim = query.shape[-1]
        return 1.0 if head_dim == 0 else 1.0 / math.sqrt(head_dim)
    return _number("scale", scale, "a finite number, or None for 1/√D", math.isfinite)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    return _number("softcap", softcap, "a number > 0, or None", lambda c: math.isfinite(c) and c > 0)


def _dropout(dropout_p: float) -> float:
    return _number("dropout_p", dropout_p, "a probability in [0, 1]", lambda p: 0 <= p <= 1)


def _number(name: str, value: object, expected: str, accept: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise DTypeError(explain_problem(name, expected=expected, got=type(value).__name__))
    if not accept(value):  # type: ignore[operator]
        raise ArgumentError(explain_problem(name, expected=expected, got=str(value)))
    return float(value)


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    heads = query.shape[1]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = str(sinks.dtype) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise DTypeError(explain_problem("sinks", expected=f"a float tensor ({heads},)", got=got))
    if tuple(sinks.shape) != (heads,):
        raise ShapeError(
            explain_problem("sinks", expected=f"one logit per query head, ({heads},)", got=shape_text(sinks.shape))
        )
    if sinks.device != query.device:
        raise DeviceError(explain_problem("sinks", expected=f"device {query.device}", got=str(sinks.device)))
    return sinks
