# pyright: basic, reportMissingImports=false
"""From tensors to launches of the kernels: strides and results."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...masks._terms import Terms
from ._columns import columns_kernel
from ._maps import map_kernel, weights_kernel
from ._operands import Operands
from ._rows import rows_kernel
from ._tiles import Tiles, block_of, tiles_for, tiles_over

#: The statistics of `rows_kernel`.
ROWS = ("lse", "entropy", "max_logit", "confidence", "sink", "distance", "visible")


class Launch(NamedTuple):
    """A kernel, the number of its programs, its arguments by name, and the tensors that it writes to."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    results: tuple[Tensor, ...]

    def run(self) -> tuple[Tensor, ...]:
        """The results, computed."""
        if self.results[0].numel():
            with torch.cuda.device_of(self.results[0]):
                self.kernel[(self.programs,)](**self.arguments)
        return self.results


def rows_launch(
    operands: Operands,
    want: Sequence[str],
    *,
    sinks: Tensor | None = None,
    first_keys: Tensor | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
    row: int = 0,
    maxima: Tensor | None = None,
) -> Launch:
    """A launch that writes the statistics (n, B, H, L) in the order of `want`.

    With `maxima` (B, H, rows, groups), it writes only those of so many rows from `row` on, and the numbers of `maxima`.
    """
    (batch, heads, length, _), count = operands.query.shape, operands.key.shape[2]
    if out is None:
        out = operands.query.new_empty((len(want), batch, heads, length), dtype=torch.float32)
    marks, strides = None, (0, 0, 1)
    if "sink" in want and first_keys is not None:
        marks = _with_whole_rows(first_keys.expand(batch, heads, count))
        strides = marks.stride()
    tiles = tiles or tiles_for("rows", operands)
    arguments = {
        **arguments_of(operands, tiles),
        **{name.upper(): want.index(name) if name in want else -1 for name in ROWS},
        "sinks": sinks, "first_keys": marks, "marks_b": strides[0], "marks_h": strides[1],
        "out": out, "out_n": batch * heads * length,
        "maxima": maxima, "groups": 0 if maxima is None else maxima.shape[3],
        "row": row, "count": length if maxima is None else maxima.shape[2],
        **(registers(tiles, 2) if tiles.warps == 8 else {}),
    }  # fmt: skip
    return Launch(rows_kernel, tiles_over(arguments["count"], tiles.queries) * batch * heads, arguments, (out,))


def columns_launch(
    operands: Operands, lse: Tensor, counted: Tensor | None = None, tiles: Tiles | None = None
) -> Launch:
    """A launch that writes received mass and viewers, (B, H, S) each."""
    (batch, heads, _, _), count = operands.query.shape, operands.key.shape[2]
    received = operands.query.new_empty((batch, heads, count), dtype=torch.float32)
    viewers = torch.empty_like(received)
    tiles = tiles or tiles_for("columns", operands)
    arguments = {
        **arguments_of(operands, tiles), **ranges_of_keys(operands),
        "lse": base_2(lse, counted), "received_out": received, "viewers_out": viewers, "ALL": counted is None,
    }  # fmt: skip
    return Launch(columns_kernel, tiles_over(count, tiles.keys) * batch * heads, arguments, (received, viewers))


def weights_launch(operands: Operands, lse: Tensor, *, average: bool, tiles: Tiles | None = None) -> Launch:
    """A launch that writes the weights (B, H, L, S), or their mean over the heads (B, 1, L, S)."""
    (batch, heads, length, _), count = operands.query.shape, operands.key.shape[2]
    out = operands.query.new_empty((batch, 1 if average else heads, length, count), dtype=torch.float32)
    tiles = tiles or tiles_for("averaged" if average else "weights", operands)
    arguments = {
        **arguments_of(operands, tiles), "lse": base_2(lse), "out": out, "HEADS": heads if average else 1,
    }  # fmt: skip
    programs = tiles_over(length, tiles.queries) * tiles_over(count, tiles.keys) * batch * out.shape[1]
    return Launch(weights_kernel, programs, arguments, (out,))


def map_launch(
    operands: Operands,
    lse: Tensor,
    cells: tuple[int, int],
    *,
    counted: Tensor | None = None,
    largest: bool = False,
    tiles: Tiles | None = None,
) -> Launch:
    """A launch that writes the pooled weights (B, H, lines, columns)."""
    (batch, heads, length, _), count = operands.query.shape, operands.key.shape[2]
    lines, columns = cells
    out = operands.query.new_empty((batch, heads, lines, columns), dtype=torch.float32)
    tiles = tiles or tiles_for("map", operands)
    # The lines and columns that fit into one tile, at least 1.
    down = max(1, tiles.queries // tiles_over(length, lines))
    across = max(1, tiles.keys // tiles_over(count, columns))
    arguments = {
        **arguments_of(operands, tiles), **registers(tiles, 2),
        "lse": base_2(lse, counted), "out": out, "lines": lines, "columns": columns,
        "lines_at_once": down, "columns_at_once": across, "LARGEST": largest,
    }  # fmt: skip
    return Launch(map_kernel, tiles_over(lines, down) * tiles_over(columns, across) * batch * heads, arguments, (out,))


def registers(tiles: Tiles, blocks: int) -> dict[str, int]:
    """An option of the compiler: registers for so many blocks on a multiprocessor. Else it spills some for more."""
    return {} if torch.version.hip is not None else {"maxnreg": min(255, 65536 // (32 * blocks * tiles.warps))}


def ranges_of_keys(operands: Operands) -> dict[str, Any]:
    """The queries that may see each key, as arguments of a kernel that passes over the queries."""
    terms = operands.terms
    alike = terms.last is not None and terms.last.shape[1] == 1
    first, last = _contiguous(terms.first_query), _contiguous(terms.last_query)
    return {"first_query": first, "last_query": last, "query_range_b": _stride_of_items(first), "ROWS_ALIKE": alike}


def base_2(lse: Tensor, counted: Tensor | None = None) -> Tensor:
    """The log-sum-exp × log2 e. It is ∞ for a query without a key, or not counted (1 or B, L): its weights are 0."""
    rows = lse.contiguous() * math.log2(math.e)
    rows.masked_fill_(rows == float("-inf"), float("inf"))
    return rows if counted is None else rows.masked_fill_(~counted[:, None], float("inf"))


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """The tensor with the elements of a row side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _stride_of_items(tensor: Tensor | None) -> int:
    """The stride of the batch items of a contiguous (1 or B, n), 0 if they share one row."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.shape[1]


def arguments_of(operands: Operands, tiles: Tiles) -> dict[str, Any]:
    """The arguments that all kernels have, by name."""
    query, key, terms, scale, softcap = operands
    # The largest product has the largest score only with a scale > 0.
    if scale <= 0:
        query, scale = (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
    query, key = _with_whole_rows(query.resolve_neg()), _with_whole_rows(key.resolve_neg())
    (batch, heads, length, dim), (_, kv_heads, count, _) = query.shape, key.shape
    (q_b, q_h, q_l, _), (k_b, k_h, k_s, _) = query.stride(), key.stride()
    is_upcast = query.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"  # it multiplies the bits
    return {
        "query": query, "key": key, "q_b": q_b, "q_h": q_h, "q_l": q_l, "k_b": k_b, "k_h": k_h, "k_s": k_s,
        "L": length, "S": count, "H": heads, "PER_KV": heads // kv_heads, "D": dim, "BLOCK_D": block_of(dim),
        "M": tiles.queries, "N": tiles.keys, "num_warps": tiles.warps, "STAGES": tiles.stages,
        "scale": scale, "softcap": softcap, "SOFTCAP": softcap != 0, "UPCAST": is_upcast,
        **_mask(terms, (batch, heads, length, count)),
    }  # fmt: skip


def _mask(terms: Terms, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """The mask's arguments of a kernel, by name."""
    first, last = _contiguous(terms.first), _contiguous(terms.last)  # of one shape
    range_b, range_l = (0, 0) if last is None else last.expand(shape[0], shape[2]).stride()
    arguments: dict[str, Any] = {
        "low": terms.low, "high": terms.high, "stop": terms.stop, "shift": terms.shift, "slopes": terms.slopes,
        "first": first, "last": last, "range_b": range_b, "range_l": range_l,
    }  # fmt: skip
    for name in ("keys", "query_documents", "key_documents"):
        tensor = _contiguous(getattr(terms, name))
        arguments |= {name: tensor, f"{name}_b": _stride_of_items(tensor)}
    for name in ("visible", "bias"):
        tensor = getattr(terms, name)
        tensor = None if tensor is None else tensor.resolve_neg().expand(shape)
        strides = (0, 0, 0, 0) if tensor is None else tensor.stride()
        arguments |= {name: tensor, **{f"{name}_{dim}": step for dim, step in zip("bhls", strides, strict=True)}}
    return arguments


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
