"""`attention_statistics`: what one attention call attends to, without its (B, H, L, S) tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._call.call import AttentionCall, build_call
from .._call.request import Request
from .._call.sharding import HeadShard
from .._environment import autocast_off, cast_for_autocast, is_tracing
from .._weights import Queries, row_numbers
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import exact_dtype, score_blocks
from ..kernels._native_statistics import gather, refuses
from ..kernels._weights import exact_weights
from ..masks._base import Mask
from .arguments import DEFAULT, Per, counted_queries, make_options, require_names, require_per
from .definitions import LIST, STATISTICS, need_values, shape_of
from .result import AttentionStatistics, Sizes
from .statistic import Options, Statistic


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
    """Fold the weights of one call, block by block, into the statistics asked for. Gradients are not recorded.

    The weights p are those of `attention` before dropout, from scores in float32, or in double precision up to 1024
    keys, whose weights are then exact to 1e-6, and for float64 inputs. Peak memory is that of a block and of the
    results.

    Args:
        query: (B, H, L, D), or (H, L, D) without a batch.
        key: (B, Hkv, S, D).
        mask, scale, softcap, sinks, query_positions, key_positions: as for `attention`.
        value: (B, Hkv, S, Dv), for ``output`` and ``output_norm``.
        statistics: names of

            {statistics}

            Q are the queries that count, and i and j positions of queries and keys. ``output`` and ``output_norm``
            need `value`. On the CPU ``output`` comes from the pass of the others, which costs less than two.
        query_mask: bool or 0/1 (B, L); queries marked 0 (padding) are left out of ``received``, ``max_logit``,
            ``raw_max_logit``, ``offset`` and ``map``. Default: all count.
        queries: which queries ``rows`` means; default all.
        top_k, map_size, map_pooling, sink_keys, offsets: see above; `map_pooling` is ``"mass"`` or ``"max"``.
        per: ``"kv_head"`` averages over the query heads of each key/value head; name the statistics then, because the
            default ones include ``top_k``, which has no average. Default ``"query_head"``.

    Returns:
        An `AttentionStatistics`.

    Raises:
        ArgumentError: for an unknown statistic or option; ``output`` or ``output_norm`` without `value`.
        ShapeError, DTypeError: as `attention`.

    Example:
        >>> import torch, clearhead
        >>> x = torch.zeros(1, 1, 4, 8)
        >>> found = clearhead.attention_statistics(x, x, clearhead.masks.causal(), statistics=("entropy",))
        >>> found.entropy.exp().round().tolist()  # a uniform query sees e^entropy keys
        [[[1.0, 2.0, 3.0, 4.0]]]
    """
    names = require_names(statistics, value is not None)
    options = make_options(top_k, map_size, map_pooling, sink_keys, offsets)
    # As `attention` under autocast, so that these are the weights of the call that the model makes.
    query, key, *values = cast_for_autocast(query, key, *(() if value is None else (value,)))
    with torch.no_grad(), autocast_off(query):
        request = Request(mask, scale, softcap, sinks, query_positions=query_positions, key_positions=key_positions)
        call = build_call(query, key, values[0] if values else None, request)
        return compute_statistics(call, names, options, counted_queries(query_mask, call), queries, per)


if attention_statistics.__doc__:  # python -OO leaves none
    attention_statistics.__doc__ = attention_statistics.__doc__.replace("{statistics}", LIST)


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
        call: all of it, or a part: then the results are those of the queries, or keys, that this process holds.
        names, options, queries, per: see `attention_statistics`; of the whole call.
        counted: (B, L) bool of the whole call, or ``None`` for all.
        heads: the call has some of a module's heads; the results are of all of them.
    """
    require_per(per, names)
    part = call.part
    with torch.no_grad(), autocast_off(call.query):
        # A part exchanges what its process lacks; what comes back is of the same form.
        results = (results_of if part is None else part.results)(call, names, options, counted, queries)
        kv_heads = call.key.shape[1]
        if heads is not None:
            results, kv_heads = heads.all_heads(results), heads.all_num_kv_heads
        sees: Tensor = results.pop("sees")
        sizes = Sizes(sees.shape[1], kv_heads, call.grid.key_length)
        # A key/value head sees a key where any of its query heads does.
        if per == "kv_head":
            group = sees.shape[1] // kv_heads
            _reduce_heads(results, names, kv_heads, group)
            sees = sees.unflatten(1, (kv_heads, group)).any(2)  # (B, Hkv, L)
        counted = _counted_here(call, counted)
        results["hidden_queries"] = (~sees).sum(-1)  # (B, H)
        results["sees"] = sees
        found = AttentionStatistics.computed(sizes, counted, results, options, per)
        return found if part is None else found.with_totals(part.totals)


def results_of(
    call: AttentionCall, names: Sequence[str], options: Options, counted: Tensor | None, queries: Queries | None
) -> dict[str, Any]:
    """Tensors of the statistics by name, of each query head, and ``sees`` (B, H, L)."""
    column = None if counted is None else counted[:, None, :, None]  # (B, 1, L, 1)
    statistics = [STATISTICS[name](call, options, column) for name in names if name != "rows"]
    # The native kernel gives what it can in one pass; a second one computes the rest.
    results = _results_natively(call, statistics, counted)
    left = [statistic for statistic in statistics if statistic.name not in results]
    # Which queries see a key is needed in any case, if only to count the others.
    if left or "sees" not in results:
        results |= fold_blocks(_blocks(call, column), left, call)
    if "rows" in names:
        results["rows"] = exact_weights(call, row_numbers(queries, call.grid.query_length, "queries"))
    return results


def _results_natively(call: AttentionCall, statistics: Sequence[Statistic], counted: Tensor | None) -> dict[str, Any]:
    """Results of those that the native kernel computes of this call, and ``sees``; empty if it computes none.

    Float64 inputs are not for it. Calls of few keys are scored in double precision all the same; see `exact_dtype`.
    """
    if call.spec.compute_dtype != torch.float32 or is_tracing() or refuses(call):
        return {}
    forms = [(statistic, form) for statistic in statistics if (form := statistic.native()) is not None]
    if not forms:
        return {}
    written = gather(
        call,
        {name: each for _, form in forms for name, each in form.items()},
        counted,
        with_output=need_values([statistic.name for statistic, _ in forms]),
        exact=exact_dtype(call) == torch.float64,
    )
    results: dict[str, Any] = {"sees": written["largest"] > float("-inf")}
    for statistic, _ in forms:
        results |= statistic.read(written)
    return results


def _counted_here(call: AttentionCall, counted: Tensor | None) -> Tensor:
    """The counted queries among those that are here, bool (B, l)."""
    if counted is None:
        return torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool, device=call.query.device)
    return counted if call.part is None else counted[:, call.part.totals.rows(counted.shape[1], counted.device)]


def _blocks(call: AttentionCall, column: Tensor | None) -> Iterator[BlockRows]:
    for block, place, query, key in score_blocks(call, dtype=exact_dtype(call)):
        yield BlockRows(call, block, place, query, key, None if column is None else column[block.batch, :, place])


def fold_blocks(blocks: Iterable[BlockRows], statistics: Sequence[Statistic], call: AttentionCall) -> dict[str, Any]:
    """Results of statistics of the queries that are here, and ``sees`` (B, H, l)."""
    for statistic in statistics:
        statistic.begin()
    # Blocks may hold some of a row's columns each: a query sees a key if it does in any of them.
    sees = torch.zeros(call.query.shape[:3], dtype=torch.bool, device=call.query.device)
    for rows in blocks:
        sees[rows.block.batch, rows.block.heads, rows.place] |= (rows.largest > float("-inf")).squeeze(-1)
        for statistic in statistics:
            statistic.add(rows)
    return {"sees": sees} | {name: found for each in statistics for name, found in each.result().items()}


def _reduce_heads(results: dict[str, Any], names: Sequence[str], kv_heads: int, group: int) -> None:
    for name in (result for statistic in names for result in STATISTICS[statistic].results()):
        if "H" in shape_of(name):
            results[name] = results[name].unflatten(1, (kv_heads, group)).mean(2)  # (B, Hkv, …)
