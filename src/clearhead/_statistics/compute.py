"""`attention_statistics`: statistics of the weights of one call, without its (B, H, L, S) tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from .._call.call import AttentionCall, build_call
from .._call.request import Request
from .._call.sharding import HeadShard
from .._environment import autocast_off, cast_for_autocast, is_tracing, no_derivatives
from .._torch_private import is_vmapped
from .._weights import Queries, row_numbers
from ..errors import ArgumentError
from ..kernels import _native_statistics
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import exact_dtype, score_blocks
from ..kernels._triton_check import triton_refusals
from ..kernels._weights import exact_weights
from ..masks._base import Mask
from ..masks._tensors import as_mask
from .arguments import DEFAULT, Per, counted_queries, make_options, require_names, require_per
from .definitions import LIST, STATISTICS, shape_of
from .result import AttentionStatistics
from .statistic import Options, Statistic
from .totals import PartialCall


def attention_statistics(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    value: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    statistics: Sequence[str] = DEFAULT,
    query_mask: Tensor | None = None,
    queries: Queries | None = None,
    top_k: int = 8,
    map_size: int = 128,
    map_pooling: Literal["mass", "max"] = "mass",
    sink_keys: int = 1,
    offsets: Sequence[int] = (-1,),
    per: Per = "query_head",
) -> AttentionStatistics:
    """Compute statistics of the weights of one call, block by block. Gradients are not recorded.

    The weights p are those of `attention` before dropout. Scores are float32. Up to 1024 keys on the CPU, and for
    float64 inputs, they have double precision, and the weights are exact to 1e-6. Peak memory is one block and the
    results.

    Args:
        query: (B, H, L, D), or (H, L, D) without a batch.
        key: (B, Hkv, S, D).
        mask, scale, softcap, sinks, query_positions, key_positions: as for `attention`.
        value: (B, Hkv, S, Dv), for ``output`` and ``output_norm``.
        statistics: names of

            {statistics}

            Q are the counted queries, and i and j positions of queries and keys. ``output`` and ``output_norm`` need
            `value`. On the CPU ``output`` comes from the same pass as the others.
        query_mask: bool or 0/1 (B, L). Queries marked 0 (padding) do not count in ``received``, ``max_logit``,
            ``raw_max_logit``, ``offset`` and ``map``. By default all queries count.
        queries: the queries that ``rows`` covers. By default ``rows`` covers all.
        top_k, map_size, map_pooling, sink_keys, offsets: see above. `map_pooling` is ``"mass"`` or ``"max"``.
        per: ``"kv_head"`` averages over the query heads of each key/value head. Pass `statistics` with it, because
            ``top_k`` is a default statistic and has no average. Default ``"query_head"``.

    Returns:
        An `AttentionStatistics`.

    Raises:
        ArgumentError: for an unknown statistic or option, and for ``output`` or ``output_norm`` without `value`.
        ShapeError, DTypeError: as `attention`.

    Example:
        >>> import torch, clearhead
        >>> x = torch.zeros(1, 1, 4, 8)
        >>> stats = clearhead.attention_statistics(x, x, clearhead.masks.causal(), statistics=("entropy",))
        >>> stats.entropy.exp().round().tolist()  # a uniform query sees e^entropy keys
        [[[1.0, 2.0, 3.0, 4.0]]]
    """
    names = require_names(statistics, value is not None)
    options = make_options(top_k, map_size, map_pooling, sink_keys, offsets)
    # `attention` casts in the same way under autocast, so these are the weights of the model's call.
    query, key, *values = cast_for_autocast(query, key, *(() if value is None else (value,)))
    _refuse_vmapped(query=query, key=key, value=value)
    with torch.no_grad(), autocast_off(query):
        request = Request(
            as_mask(mask), scale, softcap, sinks, query_positions=query_positions, key_positions=key_positions
        )
        call = build_call(query, key, values[0] if values else None, request)
        return compute_statistics(call, names, options, counted_queries(query_mask, call), queries, per)


if attention_statistics.__doc__:  # python -OO leaves none
    attention_statistics.__doc__ = attention_statistics.__doc__.replace("{statistics}", LIST)


def _refuse_vmapped(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and is_vmapped(tensor):
            fix = "Statistics are those of each item of a batch: pass what is mapped over as (B, ...)."
            raise ArgumentError(name, expected="a tensor outside torch.func.vmap", got="one that it maps over", fix=fix)


def compute_statistics(
    call: AttentionCall,
    names: Sequence[str],
    options: Options,
    counted: Tensor | None,
    queries: Queries | None = None,
    per: Per = "query_head",
    heads: HeadShard | None = None,
) -> AttentionStatistics:
    """Statistics of a validated call.

    Args:
        call: the call. The results of a `PartialCall` cover the queries, or keys, of this process.
        names, options, queries, per: see `attention_statistics`. They describe the full call.
        counted: (B, L) bool over all queries, or ``None`` if all count.
        heads: set if the call has some of a module's heads. The results then cover all of them.
    """
    require_per(per, names)
    if is_tracing():  # the graph of torch.jit has no `torch.no_grad`
        call = replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
    part, kv_heads = call if isinstance(call, PartialCall) else None, call.key.shape[1]
    with no_derivatives(), autocast_off(call.query):
        results = (results_of if part is None else part.results)(call, names, options, counted, queries)
        if heads is not None:
            results, kv_heads = heads.all_heads(results), heads.all_num_kv_heads
        sees: Tensor = results.pop("sees")  # (B, H, L)
        num_heads = sees.shape[1]
        if per == "kv_head":
            # A key/value head sees a key if any of its query heads does.
            group = (kv_heads, num_heads // kv_heads)
            sees = sees.unflatten(1, group).any(2)  # (B, Hkv, L)
            for name, tensor in results.items():
                if "H" in shape_of(name):
                    results[name] = tensor.unflatten(1, group).mean(2)  # (B, Hkv, …)
        results["sees"] = sees
        if counted is not None and part is not None:
            counted = counted[:, part.totals.rows(counted.shape[1], counted.device)]
        statistics = AttentionStatistics.computed(
            (num_heads, kv_heads, call.grid.key_length), counted, results, options
        )
        return statistics if part is None else statistics.with_totals(part.totals)


def results_of(
    call: AttentionCall, names: Sequence[str], options: Options, counted: Tensor | None, queries: Queries | None
) -> dict[str, Any]:
    """Tensors of the statistics by name, for each query head, and ``sees`` (B, H, L)."""
    column = None if counted is None else counted[:, None, :, None]  # (B, 1, L, 1)
    statistics = [STATISTICS[name](call, options, column) for name in names if name != "rows"]
    # The native or Triton kernels compute as many as they can in one pass. Blocks compute the others.
    results = _results_by_kernels(call, statistics, counted)
    missing = [statistic for statistic in statistics if statistic.name not in results]
    # `sees` is always needed, to count the fully masked queries.
    if missing or "sees" not in results:
        blocks = (
            BlockRows(call, block, place, query, key, None if column is None else column[block.batch, :, place])
            for block, place, query, key in score_blocks(call, dtype=exact_dtype(call))
        )
        results |= fold_blocks(blocks, missing, call)
    if "rows" in names:
        results["rows"] = exact_weights(call, row_numbers(queries, call.grid.query_length, "queries"))
    return results


def _results_by_kernels(call: AttentionCall, statistics: Sequence[Statistic], counted: Tensor | None) -> dict[str, Any]:
    """Results of the statistics that the native or the Triton kernels compute, and ``sees``. Empty without any."""
    by_triton = not triton_refusals(call)
    if not by_triton and _native_statistics.refusals(call):
        return {}
    requests = {each: request for each in statistics if (request := each.request(by_triton)) is not None}
    if not requests:
        return {}
    wanted = {name: argument for request in requests.values() for name, argument in request.items()}
    if by_triton:
        from ..kernels import _triton_statistics  # imports Triton

        buffers = _triton_statistics.statistics(call, wanted, counted)
    else:
        exact = exact_dtype(call) == torch.float64
        buffers = _native_statistics.statistics(call, wanted, counted, exact=exact)
    results: dict[str, Any] = {"sees": buffers["largest"] > float("-inf")}
    for statistic in requests:
        results |= statistic.read(buffers)
    return results


def fold_blocks(blocks: Iterable[BlockRows], statistics: Sequence[Statistic], call: AttentionCall) -> dict[str, Any]:
    """Results of statistics for the queries of this process, and ``sees`` (B, H, l)."""
    for statistic in statistics:
        statistic.begin()
    # A block may hold only some columns of its rows. A query sees a key if it does in any block.
    sees = torch.zeros(call.query.shape[:3], dtype=torch.bool, device=call.query.device)
    for rows in blocks:
        sees[rows.block.batch, rows.block.heads, rows.place] |= (rows.largest > float("-inf")).squeeze(-1)
        for statistic in statistics:
            statistic.add(rows)
    return {"sees": sees} | {name: tensor for each in statistics for name, tensor in each.result().items()}
