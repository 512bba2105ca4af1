"""One attention request, validated once and handed to kernels unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn, cast

import torch
from torch import Tensor

from .._checks import FLOATS, flag, is_probability, number, strided
from ..errors import DeviceError, DTypeError, ShapeError, explain_problem, shape_text
from ..masks._base import Mask
from ..masks._check import as_positions
from ..masks._coverage import COVERS_ALL, Coverage, coverage
from ..masks._grid import Grid
from ..masks._tensors import as_mask

__all__ = ["NO_SINK", "AttentionCall", "build_call", "without_hidden"]

#: As a logit it has no weight beside any score, and it is finite.
NO_SINK = -1e38


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
        reach: the fully masked rows, and the keys masked for every query.
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
    reach: Coverage

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

    def without_tensors(self) -> AttentionCall:
        """The request alone, for a backward pass: only autograd may hold the tensors, so that it can let go of them."""
        return replace(self, query=None, key=None, value=None)  # pyright: ignore[reportArgumentType]

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> AttentionCall:
        """The request about other tensors, in the order of `inputs`.

        Tensors that were one (self-attention, a bias used twice) are told apart when views are given.
        """
        others = iter(rest)
        sinks = None if self.sinks is None else next(others)
        mask = None if self.mask is None else self.mask.with_bias_tensors(others)
        return replace(self, query=query, key=key, value=value, sinks=sinks, mask=mask)

    @property
    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)


def build_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: object,
    *,
    scale: float | None,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
    query_positions: Tensor | int | None,
    key_positions: Tensor | int | None,
    return_lse: bool,
) -> AttentionCall:
    """Validate `attention`'s arguments, add a batch of one where there is none, and cut out what cannot take part.

    Queries that see no key and keys that no query sees are set to zero here, so that NaN or inf stored in
    padding reaches neither outputs nor gradients, whatever the kernel. Without a `value` the key stands in for it.
    """
    given = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    _require_tensors(given)
    _require_shapes(given)
    _require_same(given)
    if query.dim() == 3:
        query, key, value = query[None], key[None], None if value is None else value[None]  # (1, H, L, D)
    value = key if value is None else value
    grid = Grid(
        query.shape[0],
        query.shape[1],
        query.shape[2],
        key.shape[2],
        query.device,
        _positions("query_positions", query_positions, query),
        _positions("key_positions", key_positions, key, heads=query.shape[1]),
    )
    checked = None if mask is None else as_mask(mask)
    seen = COVERS_ALL
    if checked is not None:
        checked.validate(grid)
        seen = coverage(checked, grid)
    query, key, value = without_hidden(query, key, value, seen)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=checked,
        scale=_scale(scale, query),
        softcap=_softcap(softcap, query),
        sinks=_sinks(sinks, query),
        dropout_p=_dropout(dropout_p),
        dropout_seed=None,
        return_lse=flag("return_lse", return_lse),
        grid=grid,
        reach=seen,
    )


def without_hidden(query: Tensor, key: Tensor, value: Tensor, seen: Coverage) -> tuple[Tensor, Tensor, Tensor]:
    """Zero for queries that see no key, and for keys and values that no query sees."""
    if seen.masked_queries is not None:
        query = query.masked_fill(seen.masked_queries, 0)
    masked = seen.masked_keys_of(key.shape[1])
    if masked is not None:
        key, value = key.masked_fill(masked, 0), value.masked_fill(masked, 0)
    return query, key, value


def _require_tensors(given: dict[str, Tensor]) -> None:
    for name, tensor in given.items():
        strided(name, tensor)
        if tensor.dtype not in FLOATS:
            raise DTypeError(
                explain_problem(
                    name,
                    expected="float64, float32, bfloat16 or float16",
                    got=str(tensor.dtype),
                    fix="Convert it, for example with .float().",
                )
            )


def _require_shapes(given: dict[str, Tensor]) -> None:
    query, key = given["query"], given["key"]
    dims = {tensor.dim() for tensor in given.values()}
    if dims == {3, 4}:
        _mismatch(
            "numbers of dimensions: all (B, H, L, D), or all (H, L, D)", given, "Add the batch with .unsqueeze(0)."
        )
    for name, tensor in given.items():
        if tensor.dim() not in (3, 4):
            raise ShapeError(
                explain_problem(
                    name,
                    expected="(B, H, L, D), or (H, L, D) for all without a batch",
                    got=shape_text(tensor.shape),
                    fix="clearhead.split_heads turns (B, L, H·D) into (B, H, L, D).",
                )
            )
    if query.dim() == 4 and any(tensor.shape[0] != query.shape[0] for tensor in given.values()):
        _mismatch("batch sizes (B)", given, "Repeat the smaller with .expand, or check that they belong together.")
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            explain_problem(
                "key",
                expected=f"head_dim D = {query.shape[-1]} as in query {shape_text(query.shape)}",
                got=shape_text(key.shape),
                fix="Project both to the same size; only values may have another.",
            )
        )
    value = given.get("value", key)
    if value.shape[-3] != key.shape[-3]:
        _mismatch("key/value head counts (Hkv)", given, "Each key head needs its value head.")
    if value.shape[-2] != key.shape[-2]:
        _mismatch("key and value lengths (S)", given, "Each key needs its value.")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            explain_problem(
                "key",
                expected=f"a head count that divides the query's H = {heads}",
                got=f"Hkv = {kv_heads} in {shape_text(key.shape)}",
                fix="Heads are the second dimension: (B, H, L, D), not (B, L, H, D).",
            )
        )


def _mismatch(what: str, given: dict[str, Tensor], fix: str) -> NoReturn:
    shapes = ", ".join(f"{name} {shape_text(tensor.shape)}" for name, tensor in given.items())
    raise ShapeError(explain_problem(", ".join(given), expected=f"equal {what}", got=shapes, fix=fix))


def _require_same(given: dict[str, Tensor]) -> None:
    query = given["query"]
    for name, tensor in given.items():
        if tensor.dtype != query.dtype:
            raise DTypeError(
                explain_problem(
                    name,
                    expected=f"query's dtype {query.dtype}",
                    got=str(tensor.dtype),
                    fix=f"Convert it with .to({query.dtype}).",
                )
            )
        _require_device(name, tensor, query)


def _require_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise DeviceError(
            explain_problem(
                name,
                expected=f"query's device {query.device}",
                got=str(tensor.device),
                fix=f"Move it with .to({str(query.device)!r}).",
            )
        )


def _positions(name: str, positions: object, tensor: Tensor, *, heads: int | None = None) -> Tensor | int | None:
    result = as_positions(name, positions, per_head=heads is not None)
    if not isinstance(result, Tensor):
        return result
    _require_device(name, result, tensor)
    batch, length = tensor.shape[0], tensor.shape[2]
    fits = (result.shape[0] == 1 or result.shape[0] == batch) and result.shape[-1] == length
    if not fits or (result.dim() == 3 and result.shape[1] != heads):
        per_head = "" if heads is None else f" or ({batch}, {heads}, {length})"
        raise ShapeError(
            explain_problem(
                name,
                expected=f"shape ({length},) or ({batch}, {length}){per_head}",
                got=shape_text(cast(Tensor, positions).shape),
                fix="Give every query, or every key, its absolute position.",
            )
        )
    return result


def _scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        head_dim = query.shape[-1]
        return 1.0 if head_dim == 0 else 1.0 / math.sqrt(head_dim)
    most = _largest(query)
    return number("scale", scale, "a finite number, or None for 1/√D", lambda factor: -most <= factor <= most)


def _softcap(softcap: float | None, query: Tensor) -> float | None:
    if softcap is None:
        return None
    most = _largest(query)
    return number("softcap", softcap, "a number > 0, or None", lambda c: 0 < c <= most)


def _largest(query: Tensor) -> float:
    """The largest number of the dtype that scores are computed in."""
    return torch.finfo(torch.float64 if query.dtype == torch.float64 else torch.float32).max


def _dropout(dropout_p: float) -> float:
    return number("dropout_p", dropout_p, "a probability in [0, 1]", is_probability)


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    heads = query.shape[1]
    expected = f"a float tensor ({heads},)"
    if strided("sinks", sinks, expected).dtype not in FLOATS:
        raise DTypeError(explain_problem("sinks", expected=expected, got=str(sinks.dtype)))
    if tuple(sinks.shape) != (heads,):
        raise ShapeError(
            explain_problem(
                "sinks",
                expected=f"one logit per query head, ({heads},)",
                got=shape_text(sinks.shape),
                fix="Grouped heads have one sink per query head too.",
            )
        )
    _require_device("sinks", sinks, query)
    # A sink of −∞ is none, and would be the whole softmax of a query that sees no key.
    return sinks.to(torch.promote_types(sinks.dtype, torch.float32)).clamp_min(NO_SINK)
