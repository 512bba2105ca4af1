"""`attention_statistics`: statistics of the weights of one call, without its (B, H, L, S) tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._call.call import Call, build_call
from .._call.sharding import HeadShard
from .._environment import autocast_off, cast_for_autocast, is_tracing, no_derivatives
from .._torch_private import is_vmapped
from .._weights import Queries, row_numbers
from ..errors import ArgumentError
from ..kernels import _native_statistics
from ..kernels._base import Refusal
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import exact_dtype, score_blocks
from ..kernels._triton_check import triton_refusals
from ..kernels._weights import exact_weights
from ..masks._base import Mask
from ..masks._tensors import as_mask
from .arguments import DEFAULT, Per, counted_queries, make_options, require_names, require_per
from .definitions import LIST, SHAPES, STATISTICS
from .masses import Mass, require_fitting
from .result import AttentionStatistics
from .statistic import Options, Statistic
from .totals import Computed, PartialCall


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
    masses: Sequence[Mass] = (),
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
        masses: the keys that ``mass`` sums over, each a `Mass`.
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
    options = make_options(top_k, map_size, map_pooling, sink_keys, offsets, masses)
    names = require_names(statistics, value is not None, has_masses=bool(options.masses.each))
    # `attention` casts in the same way under autocast, so these are the weights of the model's call.
    query, key, *values = cast_for_autocast(query, key, *(() if value is None else (value,)))
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if isinstance(tensor, Tensor) and is_vmapped(tensor):
            fix = "Statistics are those of each item of a batch: pass what is mapped over as (B, ...)."
            raise ArgumentError(name, expected="a tensor outside torch.func.vmap", got="one that it maps over", fix=fix)
    with torch.no_grad(), autocast_off(query):
        operands = query, key, values[0] if values else key
        positions: dict[str, Any] = {"query_positions": query_positions, "key_positions": key_positions}
        call = build_call(Call(*operands, as_mask(mask), scale, softcap, sinks, **positions))
        require_fitting(options.masses, call.grid)
        return compute_statistics(call, names, options, counted_queries(query_mask, call), queries, per)


if attention_statistics.__doc__:  # python -OO leaves none
    attention_statistics.__doc__ = attention_statistics.__doc__.replace("{statistics}", LIST)


def compute_statistics(
    call: Call,
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
        call = call.alike(query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
    part, kv_heads = call if isinstance(call, PartialCall) else None, call.key.shape[1]
    with no_derivatives(), autocast_off(call.query):
        computed = (results_of if part is None else part.results)(call, names, options, counted, queries)
        if heads is not None:
            computed, kv_heads = heads.all_heads(computed), heads.all_num_kv_heads
        num_heads = computed.sees.shape[1]
        if per == "kv_head":
            computed = _averaged(computed, (kv_heads, num_heads // kv_heads))
        if counted is not None and part is not None:
            counted = counted[:, part.totals.rows(counted.shape[1], counted.device)]
        sizes = num_heads, kv_heads, call.grid.key_length
        statistics = AttentionStatistics.computed(computed, sizes, counted, options)
        return statistics if part is None else statistics.with_totals(part.totals)


def _averaged(computed: Computed, group: tuple[int, int]) -> Computed:
    """The mean over each group of query heads. A key/value head sees a key if any of its query heads does."""
    tensors, sees = computed
    tensors = {name: x.unflatten(1, group).mean(2) if "H" in SHAPES[name] else x for name, x in tensors.items()}
    return Computed(tensors, sees.unflatten(1, group).any(2))  # (B, Hkv, …), (B, Hkv, L)


def results_of(
    call: Call, names: Sequence[str], options: Options, counted: Tensor | None, queries: Queries | None
) -> Computed:
    """Results of the statistics, for each query head, by the first form without a refusal."""
    column = None if counted is None else counted[:, None, :, None]  # (B, 1, L, 1)
    statistics = [STATISTICS[name](call, options, column) for name in names if name != "rows"]
    computed = next(form for form in FORMS if not form.refusals(call)).compute(call, statistics, counted)
    if "rows" in names:
        computed.tensors["rows"] = exact_weights(call, row_numbers(queries, call.grid.query_length, "queries"))
    return computed


class Form(NamedTuple):
    """One way to compute statistics: the reasons against a call, and the results. `counted` is bool (B, L)."""

    refusals: Callable[[Call], tuple[Refusal, ...]]
    compute: Callable[[Call, Sequence[Statistic], Tensor | None], Computed]


def _by_triton(call: Call, statistics: Sequence[Statistic], counted: Tensor | None) -> Computed:
    from ..kernels import _triton_statistics  # imports Triton

    return _by_kernel(_triton_statistics.statistics, call, {each: each.triton_form() for each in statistics}, counted)


def _by_native(call: Call, statistics: Sequence[Statistic], counted: Tensor | None) -> Computed:
    return _by_kernel(_native_statistics.statistics, call, {each: each.native_form() for each in statistics}, counted)


def _by_kernel(
    write: Callable[..., dict[str, Any]], call: Call, forms: dict[Statistic, Any], counted: Tensor | None
) -> Computed:
    """Statistics from buffers that one pass of a kernel writes, and from blocks where they have no such form."""
    others = [each for each, form in forms.items() if form is None]
    if len(others) == len(forms):
        return _by_blocks(call, others, counted)
    wanted = {name: x for form in forms.values() for name, x in (form or {}).items()}
    if not all(each.options.exact for each in forms):
        wanted["exact"] = False
    buffers = write(call, wanted, counted)
    tensors = {name: x for each in forms if each not in others for name, x in each.read(buffers).items()}
    if others:
        tensors |= _by_blocks(call, others, counted).tensors
    return Computed(tensors, buffers["largest"] > float("-inf"))


def _by_blocks(call: Call, statistics: Sequence[Statistic], counted: Tensor | None) -> Computed:
    column = None if counted is None else counted[:, None, :, None]  # (B, 1, L, 1)
    exact = all(each.options.exact for each in statistics)
    dtype = exact_dtype(call) if exact else call.layout.compute_dtype
    blocks = (
        BlockRows(call, block, place, query, key, None if column is None else column[block.batch, :, place])
        for block, place, query, key in score_blocks(call, dtype=dtype)
    )
    return fold_blocks(blocks, statistics, call)


#: In order of preference. Blocks refuse nothing, and compute every statistic.
FORMS = (
    Form(triton_refusals, _by_triton),
    Form(_native_statistics.refusals, _by_native),
    Form(lambda _: (), _by_blocks),
)


def fold_blocks(blocks: Iterable[BlockRows], statistics: Sequence[Statistic], call: Call) -> Computed:
    """Results of statistics for the queries of this process."""
    for statistic in statistics:
        statistic.begin()
    # A block may hold only some columns of its rows. A query sees a key if it does in any block.
    sees = torch.zeros(call.query.shape[:3], dtype=torch.bool, device=call.query.device)
    for rows in blocks:
        sees[rows.block.batch, rows.block.heads, rows.place] |= (rows.largest > float("-inf")).squeeze(-1)
        for statistic in statistics:
            statistic.add(rows)
    return Computed({name: tensor for each in statistics for name, tensor in each.result().items()}, sees)
