"""`weights` and `pooled`, each one operator of PyTorch: a Triton kernel on a GPU, the formula on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._available import runs_kernels
from ._formula import pooled_by_formula, scores, weights_of
from ._operators import MASK_SCHEMA, library, register, terms_from
from ._terms import Terms


def weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float | None = None,
    average: bool = False,
) -> Tensor:
    """The weights, float32 (B, H, L, S), or their mean over the heads, (B, L, S). Each is written once.

    Args:
        query, key, terms, scale, softcap: as for `rows`.
        lse: float32 (B, H, L), with the sinks.
        average: whether to average over the heads.
    """
    operands = query.detach(), key.detach(), lse.detach()
    found = torch.ops.clearhead.triton_weights(*operands, terms.tensors, terms.numbers, scale, softcap or 0.0, average)
    return found.squeeze(1) if average else found


def pooled(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    cells: tuple[int, int],
    *,
    scale: float,
    softcap: float | None = None,
    counted: Tensor | None = None,
    largest: bool = False,
) -> Tensor:
    """The weights summed over the cells of a map, or the largest of each cell, float32 (B, H, lines, columns).

    Query i belongs to line ⌊i · lines / L⌋, and key j to column ⌊j · columns / S⌋.

    Args:
        query, key, terms, scale, softcap: as for `rows`.
        lse: float32 (B, H, L), with the sinks.
        cells: lines and columns of the map, at most L and S.
        counted: bool (1 or B, L), the queries that are counted; ``None`` for all.
        largest: whether a cell has its largest weight, not the sum.
    """
    operands = query.detach(), key.detach(), lse.detach(), counted
    mask = terms.tensors, terms.numbers, scale, softcap or 0.0
    return torch.ops.clearhead.triton_pooled(*operands, *mask, cells, largest)


library.define(f"triton_weights(Tensor query, Tensor key, Tensor lse, {MASK_SCHEMA}, bool average) -> Tensor")


def _weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
    softcap: float,
    average: bool,
) -> Tensor:
    terms = terms_from(tensors, numbers)
    if not runs_kernels(query):
        found = weights_of(scores(query, key, terms, scale, softcap), lse)
        return found.mean(1, keepdim=True) if average else found
    from ._launch import weights_launch

    return weights_launch(query, key, lse, terms, scale=scale, softcap=softcap, average=average).run()[0]


def _fake_weights(query: Tensor, key: Tensor, *others: Any) -> Tensor:
    heads = 1 if others[-1] else query.shape[1]
    return query.new_empty((query.shape[0], heads, query.shape[2], key.shape[2]), dtype=torch.float32)


register("triton_weights", _weights, _fake_weights)


library.define(
    f"triton_pooled(Tensor query, Tensor key, Tensor lse, Tensor? counted, {MASK_SCHEMA}, SymInt[] cells, bool largest)"
    " -> Tensor"
)


def _pooled(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    counted: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    scale: float,
    softcap: float,
    cells: Sequence[int],
    largest: bool,
) -> Tensor:
    terms, (lines, columns) = terms_from(tensors, numbers), cells
    if not runs_kernels(query):
        weights = weights_of(scores(query, key, terms, scale, softcap), lse)
        return pooled_by_formula(weights, counted, (lines, columns), largest)
    from ._launch import map_launch

    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "counted": counted, "largest": largest}
    return map_launch(query, key, lse, terms, cells=(lines, columns), **options).run()[0]


def _fake_pooled(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty((*query.shape[:2], *others[-2]), dtype=torch.float32)


register("triton_pooled", _pooled, _fake_pooled)
