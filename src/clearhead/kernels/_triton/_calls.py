# pyright: basic, reportMissingImports=false
"""The kernels as functions of tensors. Importing this module imports Triton. The same inputs give the same bits."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ._gradients_launch import key_gradient_launch, query_gradient_launch
from ._launch import ROWS, columns_launch, map_launch, rows_launch, weights_launch
from ._operands import Operands
from ._top_launch import rows_and_top


def rows(
    operands: Operands,
    *,
    sinks: Tensor | None = None,
    first_keys: Tensor | None = None,
    want: Collection[str] = ("lse",),
    top: int = 0,
) -> dict[str, Tensor]:
    """Statistics of each query, in one pass over the keys.

    Args:
        operands: of the call.
        sinks: (H,), or ``None``.
        first_keys: bool (1 or B, 1 or H, S), the keys whose mass is ``sink``.
        want: names out of lse, entropy (nats), max_logit (the largest score), confidence (the largest weight), sink,
            distance (positions) and visible (how many keys the query sees). Other names are ignored.
        top: how many of the largest weights, 0 ≤ top ≤ S. Any number above 0 needs ``"lse"`` in `want`.

    Returns:
        Each, float32 (B, H, L). A query that sees no key has lse −∞ or its sink, max_logit −∞, and 0 in all others.
        With `top` also top_weights float32 and top_keys int64, (B, H, L, top) each: the largest weights and the numbers
        of their keys, largest first, and of equal ones the first key first. Where fewer keys are visible, 0 and −1.
    """
    # In one order, so that each set of names compiles once.
    names = [name for name in ROWS if name in want]
    if not top:
        (numbers,) = rows_launch(operands, names, sinks=sinks, first_keys=first_keys).run()
        return dict(zip(names, numbers, strict=True))
    numbers, weights, keys = rows_and_top(operands, top, names, sinks=sinks, first_keys=first_keys)
    return {**dict(zip(names, numbers, strict=True)), "top_weights": weights, "top_keys": keys}


def columns(operands: Operands, lse: Tensor, counted: Tensor | None = None) -> tuple[Tensor, ...]:
    """The mass that each key receives, and the number of queries that see it, in one pass over the queries.

    Args:
        operands: of the call.
        lse: float32 (B, H, L), with the sinks.
        counted: bool (1 or B, L), the queries that are counted; ``None`` for all.

    Returns:
        Received mass and viewers, float32 (B, H, S) each.
    """
    return columns_launch(operands, lse, counted).run()


def weights(operands: Operands, lse: Tensor, *, average: bool = False) -> Tensor:
    """The weights, float32 (B, H, L, S), or their mean over the heads, (B, L, S). Each is written once.

    Args:
        operands, lse: as for `columns`.
        average: whether to average over the heads.
    """
    (result,) = weights_launch(operands, lse, average=average).run()
    return result.squeeze(1) if average else result


def pooled(
    operands: Operands, lse: Tensor, cells: tuple[int, int], *, counted: Tensor | None = None, largest: bool = False
) -> Tensor:
    """The weights summed over the cells of a map, or the largest of each cell, float32 (B, H, lines, columns).

    Query i belongs to line ⌊i · lines / L⌋, and key j to column ⌊j · columns / S⌋.

    Args:
        operands, lse, counted: as for `columns`.
        cells: lines and columns of the map, at most L and S.
        largest: whether a cell has its largest weight, not the sum.
    """
    (result,) = map_launch(operands, lse, cells, counted=counted, largest=largest).run()
    return result


def weights_gradients(operands: Operands, lse: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query and key from that of the weights, dp. The weights are computed again, and never stored.

    Args:
        operands, lse: as for `columns`.
        gradient: of the weights (B, H, L, S), or of their mean over the heads (B, 1, L, S); floats, any strides.

    Returns:
        Gradients of query (B, H, L, D) and key (B, Hkv, S, D), and Σ_j p dp (B, H, L), in float32.
    """
    of_query, means = query_gradient_launch(operands, lse, gradient).run()
    (of_key,) = key_gradient_launch(operands, lse, gradient, means).run()
    return of_query, of_key, means
