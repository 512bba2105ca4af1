"""`rows` and `columns`, each one operator of PyTorch: Triton kernels on a GPU, the formulas on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._available import runs_kernels
from ._formula import columns_by_formula, rows_by_formula, top_by_formula
from ._terms import Terms

ROWS = ("lse", "entropy", "max_logit", "confidence", "sink", "distance", "visible")


def rows(
    query: Tensor,
    key: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_keys: Tensor | None = None,
    want: Sequence[str] = ("lse",),
    top: int = 0,
) -> dict[str, Tensor]:
    """Statistics of each query, in one pass over the keys.

    Args:
        query: (B, H, L, D), any strides.
        key: (B, Hkv, S, D), any strides; Hkv divides H.
        terms: the mask, from `terms_of`.
        scale: factor of the scores.
        softcap: c of s ← c·tanh(s/c), or ``None``.
        sinks: (H,), or ``None``.
        first_keys: bool (1 or B, 1 or H, S), the keys whose mass is ``sink``.
        want: names out of lse, entropy (nats), max_logit (the largest score), confidence (the largest weight), sink,
            distance (positions) and visible (how many keys the query sees).
        top: how many of the largest weights, 0 ≤ top ≤ S. Any number above 0 needs ``"lse"`` in `want`.

    Returns:
        Each, float32 (B, H, L). A query that sees no key has lse −∞ or its sink, max_logit −∞, and 0 in all others.
        With `top` also top_weights float32 and top_keys int64, (B, H, L, top) each: the largest weights and the numbers
        of their keys, largest first, and of equal ones the first key first. Where fewer keys are visible, 0 and −1.
    """
    # Sorted, so that each set of names compiles once.
    names = [name for name in ROWS if name in want]
    numbers, weights, keys = torch.ops.clearhead.triton_rows(
        query.detach(),
        key.detach(),
        None if sinks is None else sinks.detach(),
        first_keys,
        terms.tensors,
        terms.numbers,
        scale,
        softcap or 0.0,
        [ROWS.index(name) for name in names],
        top,
    )
    found = dict(zip(names, numbers.unbind(0), strict=True))
    return found | {"top_weights": weights, "top_keys": keys} if top else found


def columns(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mass that each key receives, and the number of queries that see it, in one pass over the queries.

    Args:
        query, key, terms, scale, softcap: as for `rows`.
        lse: float32 (B, H, L), with the sinks.
        counted: bool (1 or B, L), the queries that are counted; ``None`` for all.

    Returns:
        Received mass and viewers, float32 (B, H, S) each. The same inputs give the same bits.
    """
    operands = query.detach(), key.detach(), lse.detach(), counted
    received, viewers = torch.ops.clearhead.triton_columns(
        *operands, terms.tensors, terms.numbers, scale, softcap or 0.0
    )
    return received, viewers


MASK_SCHEMA = "Tensor?[] terms, SymInt[] numbers, float scale, float softcap"
library = torch.library.Library("clearhead", "FRAGMENT")
library.define(
    f"triton_rows(Tensor query, Tensor key, Tensor? sinks, Tensor? first_keys, {MASK_SCHEMA}, int[] want, SymInt top)"
    " -> (Tensor, Tensor, Tensor)"
)
library.define(
    f"triton_columns(Tensor query, Tensor key, Tensor lse, Tensor? counted, {MASK_SCHEMA}) -> (Tensor, Tensor)"
)


def terms_from(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Terms:
    low, high, stop, shift = numbers
    return Terms(low, high, stop, shift, *tensors)


def _rows(
    query: Tensor,
    key: Tensor,
    sinks: Tensor | None,
    first_keys: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
    softcap: float,
    want: Sequence[int],
    top: int,
) -> tuple[Tensor, Tensor, Tensor]:
    terms, names = terms_from(tensors, numbers), [ROWS[number] for number in want]
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "first_keys": first_keys}
    if not runs_kernels(query):
        found = rows_by_formula(query, key, terms, **options)
        weights, keys = top_by_formula(query, key, found["lse"], terms, top, scale, softcap)
        return torch.stack([found[name] for name in names]), weights, keys
    if top:
        from ._top_launch import rows_and_top

        return rows_and_top(query, key, terms, top, **options, want=names)
    from ._launch import rows_launch

    empty = query.new_empty((*query.shape[:3], 0), dtype=torch.float32)
    found = rows_launch(query, key, terms, **options, want=names).run()
    return found[0], empty, torch.empty_like(empty, dtype=torch.int64)


def _columns(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    counted: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    terms = terms_from(tensors, numbers)
    if not runs_kernels(query):
        return columns_by_formula(query, key, lse, terms, counted, scale, softcap)
    from ._launch import columns_launch

    launch = columns_launch(query, key, lse, terms, counted=counted, scale=scale, softcap=softcap)
    received, viewers = launch.run()
    return received, viewers


def _fake_rows(query: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    want, top = others[-2:]
    shape = query.shape[:3]
    numbers = query.new_empty((len(want), *shape), dtype=torch.float32)
    weights = query.new_empty((*shape, top), dtype=torch.float32)
    return numbers, weights, torch.empty_like(weights, dtype=torch.int64)


def _fake_columns(query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:2], key.shape[2])
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def register(name: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make `compute` the operator on GPUs and CPUs, and let `fake` give the shapes of its results."""
    library.impl(name, compute, "CUDA")
    library.impl(name, compute, "CPU")
    torch.library.register_fake(f"clearhead::{name}", fake, lib=library)


register("triton_rows", _rows, _fake_rows)
register("triton_columns", _columns, _fake_columns)
