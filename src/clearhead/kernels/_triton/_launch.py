# pyright: basic, reportMissingImports=false
"""From tensors to launches of the kernels: strides and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._available import interprets
from ._columns import columns_kernel
from ._maps import map_kernel, weights_kernel
from ._rows import rows_kernel
from ._terms import Terms
from ._tiles import Tiles, block_of, tiles_for, tiles_over


class Launch(NamedTuple):
    """A kernel, the number of its programs, its arguments by name, and the tensors that it writes to."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    results: tuple[Tensor, ...]

    def run(self) -> tuple[Tensor, ...]:
        """The results, computed."""
        if self.programs:
            with torch.cuda.device_of(self.results[0]):
                self.kernel[(self.programs,)](**self.arguments)
        return self.results


def rows_launch(
    query: Tensor,
    key: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    first_keys: Tensor | None,
    want: Sequence[str],
    tiles: Tiles | None = None,
    out: Tensor | None = None,
    row: int = 0,
    maxima: Tensor | None = None,
) -> Launch:
    """A launch that writes the statistics (n, B, H, L) in the order of `want`.

    With `maxima` (B, H, rows, groups), it writes only those of so many rows from `row` on, and the numbers of `maxima`.
    """
    (batch, heads, length, _), count = query.shape, key.shape[2]
    if out is None:
        out = query.new_empty((len(want), batch, heads, length), dtype=torch.float32)
    marks = None
    if "sink" in want and first_keys is not None:
        marks = first_keys.expand(batch, heads, count)
        marks = marks if marks.stride(2) == 1 else marks.contiguous()
    tiles = tiles or tiles_for("rows", query, terms, softcap)
    numbers = {name.upper(): want.index(name) if name in want else -1 for name in _NAMES}
    numbers["LARGEST"] = numbers.pop("MAX_LOGIT")
    arguments = {
        **arguments_of(query, key, terms, scale, softcap, tiles), **numbers,
        "sinks": sinks, "first_keys": marks, "out": out, "out_n": batch * heads * length,
        "marks_b": 0 if marks is None else marks.stride(0), "marks_h": 0 if marks is None else marks.stride(1),
        "maxima": maxima, "groups": 0 if maxima is None else maxima.shape[3],
        "row": row, "count": length if maxima is None else maxima.shape[2],
        **(registers(tiles, 2) if tiles.warps == 8 else {}),
    }  # fmt: skip
    programs = tiles_over(arguments["count"], tiles.queries) * batch * heads
    return Launch(rows_kernel, programs if out.numel() else 0, arguments, (out,))


def columns_launch(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    counted: Tensor | None,
    scale: float,
    softcap: float,
    tiles: Tiles | None = None,
) -> Launch:
    """A launch that writes received mass and viewers, (B, H, S) each."""
    (batch, heads, _, _), count = query.shape, key.shape[2]
    received = query.new_empty((batch, heads, count), dtype=torch.float32)
    viewers = torch.empty_like(received)
    tiles = tiles or tiles_for("columns", query, terms, softcap)
    arguments = {
        **arguments_of(query, key, terms, scale, softcap, tiles), **ranges_of_keys(terms),
        "lse": base_2(lse, counted), "received_out": received, "viewers_out": viewers, "ALL": counted is None,
    }  # fmt: skip
    programs = tiles_over(count, tiles.keys) * batch * heads
    return Launch(columns_kernel, programs if received.numel() else 0, arguments, (received, viewers))


def weights_launch(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    scale: float,
    softcap: float,
    average: bool,
    tiles: Tiles | None = None,
) -> Launch:
    """A launch that writes the weights (B, H, L, S), or their mean over the heads (B, 1, L, S)."""
    (batch, heads, length, _), count = query.shape, key.shape[2]
    out = query.new_empty((batch, 1 if average else heads, length, count), dtype=torch.float32)
    tiles = tiles or tiles_for("averaged" if average else "weights", query, terms, softcap)
    arguments = {
        **arguments_of(query, key, terms, scale, softcap, tiles),
        "lse": base_2(lse), "out": out, "HEADS": heads if average else 1,
    }  # fmt: skip
    programs = tiles_over(length, tiles.queries) * tiles_over(count, tiles.keys) * batch * out.shape[1]
    return Launch(weights_kernel, programs if out.numel() else 0, arguments, (out,))


def map_launch(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    terms: Terms,
    *,
    cells: tuple[int, int],
    counted: Tensor | None,
    largest: bool,
    scale: float,
    softcap: float,
    tiles: Tiles | None = None,
) -> Launch:
    """A launch that writes the pooled weights (B, H, lines, columns)."""
    (batch, heads, length, _), count = query.shape, key.shape[2]
    lines, columns = cells
    out = query.new_empty((batch, heads, lines, columns), dtype=torch.float32)
    tiles = tiles or tiles_for("map", query, terms, softcap)
    # The lines and columns that fit into one tile, at least 1.
    down = max(1, tiles.queries // tiles_over(length, lines)) if out.numel() else 1
    across = max(1, tiles.keys // tiles_over(count, columns)) if out.numel() else 1
    arguments = {
        **arguments_of(query, key, terms, scale, softcap, tiles),
        "lse": base_2(lse, counted), "out": out, "lines": lines, "columns": columns,
        "lines_at_once": down, "columns_at_once": across, "LARGEST": largest, **registers(tiles, 2),
    }  # fmt: skip
    programs = tiles_over(lines, down) * tiles_over(columns, across) * batch * heads
    return Launch(map_kernel, programs if out.numel() else 0, arguments, (out,))


def registers(tiles: Tiles, blocks: int) -> dict[str, int]:
    """An option of the compiler: registers for so many blocks on a multiprocessor. Else it spills some for more."""
    return {} if torch.version.hip is not None else {"maxnreg": min(255, 65536 // (32 * blocks * tiles.warps))}


def ranges_of_keys(terms: Terms) -> dict[str, Any]:
    """The queries that may see each key, as arguments of a kernel that passes over the queries."""
    first, last = terms.first_query, terms.last_query
    alike = terms.last is not None and terms.last.shape[1] == 1
    if first is None or last is None:
        return {"first_query": None, "last_query": None, "query_range_b": 0, "ROWS_ALIKE": alike}
    stride = 0 if first.shape[0] == 1 else first.shape[1]
    ranges = {"first_query": first.contiguous(), "last_query": last.contiguous(), "query_range_b": stride}
    return ranges | {"ROWS_ALIKE": alike}


def base_2(lse: Tensor, counted: Tensor | None = None) -> Tensor:
    """The log-sum-exp × log2 e. It is ∞ for a query without a key, or not counted (1 or B, L): its weights are 0."""
    rows = lse.contiguous() * math.log2(math.e)
    rows.masked_fill_(rows == float("-inf"), float("inf"))
    return rows if counted is None else rows.masked_fill_(~counted[:, None], float("inf"))


_NAMES = ("lse", "entropy", "max_logit", "confidence", "sink", "distance", "visible")


def _operands(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
    """Operands whose features lie side by side, and a scale > 0, so that the largest product has the largest score."""
    if scale <= 0:
        query, scale = (-query, -scale) if scale else (torch.zeros_like(query), 1.0)
    query, key = query.resolve_neg(), key.resolve_neg()
    query = query if query.stride(3) == 1 else query.contiguous()
    return query, key if key.stride(3) == 1 else key.contiguous(), scale


def arguments_of(
    query: Tensor, key: Tensor, terms: Terms, scale: float, softcap: float, tiles: Tiles
) -> dict[str, Any]:
    """The arguments that all kernels have, by name."""
    query, key, scale = _operands(query, key, scale)
    (batch, heads, length, dim), (_, kv_heads, count, _) = query.shape, key.shape
    (q_b, q_h, q_l, _), (k_b, k_h, k_s, _) = query.stride(), key.stride()
    return {
        "query": query, "key": key, "q_b": q_b, "q_h": q_h, "q_l": q_l, "k_b": k_b, "k_h": k_h, "k_s": k_s,
        "L": length, "S": count, "H": heads, "GROUP": heads // kv_heads, "D": dim, "BLOCK_D": block_of(dim),
        "M": tiles.queries, "N": tiles.keys, "num_warps": tiles.warps, "STAGES": tiles.stages,
        "scale": scale, "softcap": softcap, "SOFTCAP": softcap != 0, "UPCAST": _upcasts(query),
        **_mask(terms, batch, heads, length, count),
    }  # fmt: skip


def _mask(terms: Terms, batch: int, heads: int, length: int, count: int) -> dict[str, Any]:
    """The mask's arguments of a kernel, by name."""
    names = ("first", "last", "range_b", "range_l", "keys", "keys_b", "visible", "bias", "query_documents")
    arguments: dict[str, Any] = dict.fromkeys((*names, "key_documents", "slopes"))
    arguments.update(low=terms.low, high=terms.high, stop=terms.stop, shift=terms.shift)
    for name in ("range_b", "range_l", "keys_b", "query_documents_b", "key_documents_b"):
        arguments[name] = 0
    for name in ("visible", "bias"):
        tensor = getattr(terms, name)
        strides = (0, 0, 0, 0)
        if tensor is not None:
            tensor = tensor.resolve_neg().expand(batch, heads, length, count)
            arguments[name], strides = tensor, tensor.stride()
        arguments.update(zip((f"{name}_b", f"{name}_h", f"{name}_l", f"{name}_s"), strides, strict=True))
    if terms.last is not None:
        last = terms.last.contiguous()
        of_item, of_row = last.expand(batch, length).stride()
        first = None if terms.first is None else terms.first.contiguous()
        arguments.update(first=first, last=last, range_b=of_item, range_l=of_row)
    for name in ("keys", "query_documents", "key_documents"):
        tensor = getattr(terms, name)
        if tensor is not None:
            tensor = tensor.contiguous()
            arguments[name], arguments[f"{name}_b"] = tensor, 0 if tensor.shape[0] == 1 else tensor.shape[1]
    arguments["slopes"] = terms.slopes
    return arguments


def _upcasts(query: Tensor) -> bool:
    # The interpreter multiplies the bits of bfloat16.
    return interprets() and query.dtype == torch.bfloat16
