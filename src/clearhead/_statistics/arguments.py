"""Checks of the arguments of statistics: names, options and counted queries."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Literal

import torch
from torch import Tensor

from .._call.call import Call
from .._checks import INTEGERS, LARGEST, choice, items, shown, strided, with_values
from ..errors import ArgumentError, ShapeError, shape_text
from .definitions import STATISTICS
from .masses import Mass, make_masses
from .statistic import Options

Per = Literal["query_head", "kv_head"]
DEFAULT = ("entropy", "received", "max_logit", "top_k")


def require_names(statistics: Sequence[str], has_value: bool, *, has_masses: bool = False) -> tuple[str, ...]:
    """Check the names of statistics.

    Raises:
        ArgumentError: for an unknown name, or for a statistic without the argument that it needs.
    """
    expected = f"names among {', '.join(STATISTICS)}"
    names = (statistics,) if isinstance(statistics, str) else tuple(items("statistics", statistics, expected))
    for name in names:
        if not isinstance(name, str) or name not in STATISTICS:
            raise ArgumentError("statistics", expected=expected, got=shown(name))
        if STATISTICS[name].of == "values" and not has_value:
            raise ArgumentError("statistics", expected=f"value= for {name!r}", got="no value", fix="Pass value=.")
        if STATISTICS[name].argument == "masses" and not has_masses:
            fix = "Pass masses= to attention_statistics, or take a clearhead.census of a model."
            raise ArgumentError("statistics", expected=f"masses= for {name!r}", got="no masses", fix=fix)
    # Duplicates are computed once.
    return tuple(dict.fromkeys(names))


def make_options(
    top_k: int,
    map_size: int,
    map_pooling: Literal["mass", "max"],
    sink_keys: int,
    offsets: Sequence[int],
    masses: Sequence[Mass] = (),
) -> Options:
    """Check the options.

    Raises:
        ArgumentError: for a number below 1 or an unknown pooling.
    """
    for name, number in (("top_k", top_k), ("map_size", map_size), ("sink_keys", sink_keys)):
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LARGEST:
            raise ArgumentError(name, expected="an int ≥ 1", got=shown(number))
    choice("map_pooling", map_pooling, ("mass", "max"))
    return Options(top_k, map_size, map_pooling, sink_keys, whole_numbers("offsets", offsets), make_masses(masses))


def whole_numbers(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """Check a list of integers.

    Raises:
        ArgumentError: for anything else.
    """
    expected = "a list of whole numbers"
    try:
        # NumPy integers and one-element tensors are accepted. Floats such as 2.0 are not.
        integers = tuple(index(number) for number in items(name, numbers, expected))
    except (TypeError, RuntimeError):  # tensors on meta have no numbers
        raise ArgumentError(name, expected=expected, got=shown(numbers)) from None
    if not all(-LARGEST <= number <= LARGEST for number in integers):
        raise ArgumentError(name, expected=f"{expected} of at most {LARGEST}", got=shown(numbers))
    return integers


def require_per(per: Per, names: Sequence[str]) -> None:
    """Check `per`: ``"kv_head"`` needs statistics that have an average over heads.

    Raises:
        ArgumentError: for another word, or statistics without an average.
    """
    choice("per", per, ("query_head", "kv_head"))
    unaveraged = [name for name in names if not STATISTICS[name].averaged]
    verb = "have" if len(unaveraged) > 1 else "has"
    if per == "kv_head" and unaveraged:
        raise ArgumentError(
            "per",
            expected=f"'query_head' for {' and '.join(unaveraged)}, which {verb} no average over heads",
            got="'kv_head'",
            fix=f"Write statistics={tuple(name for name in names if name not in unaveraged)}.",
        )


def counted_queries(query_mask: Tensor | None, call: Call) -> Tensor | None:
    """Check a `query_mask` against a call. Returns bool (B, L), or ``None``.

    Raises:
        DTypeError, ShapeError: if dtype or shape does not fit the call.
    """
    if query_mask is None:
        return None
    expected = (call.grid.batch_size, call.grid.query_length)
    query_mask = query_marks(query_mask)
    if tuple(query_mask.shape) != expected:
        raise ShapeError("query_mask", expected=f"(B, L) = {expected}", got=shape_text(query_mask.shape))
    return query_mask.to(device=call.query.device, dtype=torch.bool)


def query_marks(query_mask: object) -> Tensor:
    """Check that `query_mask` is a bool or 0/1 tensor, of any shape.

    Raises:
        DTypeError: for anything else.
    """
    expected = "a bool or 0/1 tensor (B, L)"
    return with_values("query_mask", strided("query_mask", query_mask, expected, dtypes=(torch.bool, *INTEGERS)))
