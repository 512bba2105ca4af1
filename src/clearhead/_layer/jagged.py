"""Jagged nested tensors: batches of sequences of different lengths, split into tokens and made jagged again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._call.sequences import PackedSequences, read_sequences
from .._checks import with_values
from .._environment import Environment
from .._torch_private import is_rows_of
from ..errors import ArgumentError, DTypeError, ShapeError
from ..masks._base import Mask
from .unmodified import apply_linear, takes_packed

_NAMES = "query", "key", "value"


def is_jagged(*tensors: Tensor | None) -> bool:
    """Whether any of them is nested.

    Raises:
        ShapeError: if one is nested with strides instead of offsets.
    """
    jagged = False
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor) and tensor.is_nested:
            if tensor.layout != torch.jagged:
                name, fix = _NAMES[number], "Make it with torch.nested.nested_tensor(..., layout=torch.jagged)."
                raise ShapeError(name, expected="the layout torch.jagged", got=str(tensor.layout), fix=fix)
            jagged = True
    return jagged


def read_jagged(
    query: Tensor, key: Tensor, value: Tensor, *, side_by_side: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], PackedSequences, Callable[[Tensor], Tensor]]:
    """Read jagged (B, lengths, features) tensors as packed sequences.

    Args:
        query, key, value: the inputs of self-attention or cross-attention.
        side_by_side: whether queries and keys need equal lengths, for a position part.

    Returns:
        Query, key and value, (T, features) and (Tk, features). The boundaries of the sequences. A function that makes
        (T, features) jagged like the query.

    Raises:
        ShapeError: if an input is not jagged, or has holes or more dimensions than these. If batch sizes disagree, or
            lengths that must be equal.
    """
    inputs = {"query": query, "key": key, "value": value}
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise DTypeError(name, expected="a jagged tensor, like query", got=type(tensor).__name__)
        with_values(name, tensor)
        if not tensor.is_nested or not is_rows_of(tensor):
            fix = "Give query, key and value jagged alike, without holes, or pad them all and pass masks.lengths(...)."
            got = "a jagged tensor of another shape" if tensor.is_nested else "a padded tensor"
            raise ShapeError(name, expected="a jagged (B, lengths, features) tensor", got=got, fix=fix)
        if tensor.shape[0] != query.shape[0]:
            raise ShapeError(name, expected=f"the query's {query.shape[0]} rows", got=str(tensor.shape[0]))
    if value.values().shape[0] != key.values().shape[0]:
        raise ShapeError("value", expected="the key's lengths", got="others", fix="Each key needs its value.")
    # The offsets of a jagged tensor are `cu_seqlens`.
    offsets: Tensor = cast(Any, query).offsets()
    sequences = read_sequences(offsets, cast(Any, key).offsets(), query.values(), key.values())
    if side_by_side and key is not query:
        _require_side_by_side(sequences)

    def jagged(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, offsets)

    return (query.values(), key.values(), value.values()), sequences, jagged


def calling_with(
    inputs: tuple[Tensor, Tensor, Tensor], tokens: tuple[Tensor, Tensor, Tensor]
) -> Callable[[nn.Module, Tensor, Environment], Tensor]:
    """`apply_linear` for the tokens of jagged inputs. Modified projections receive the jagged input instead."""
    jagged = dict(zip(map(id, tokens), inputs, strict=True))

    def call(module: nn.Module, x: Tensor, environment: Environment) -> Tensor:
        if environment.tracing or takes_packed(module) or id(x) not in jagged:
            return apply_linear(module, x, environment)
        return module(jagged[id(x)]).values()  # (T, features)

    return call


def _require_side_by_side(sequences: PackedSequences) -> None:
    if sequences.queries != sequences.keys:
        expected = "the query's lengths: a position part rotates both by the same positions"
        fix = "Use position= in self-attention, and a module without it for cross-attention."
        raise ShapeError("key", expected=expected, got="others", fix=fix)


def refuse_jagged(**arguments: object) -> None:
    """Raise for arguments that only padded batches have."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            fix = "Use torch.nested.to_padded_tensor(...) and masks.lengths(...)."
            expected = "nothing beside jagged inputs"
            got = value.describe() if isinstance(value, Mask) else type(value).__name__
            raise ArgumentError(name, expected=expected, got=got, fix=fix)
