"""Statistics of a call of which this process holds some queries and keys.

With the method *heads* the process has all queries of some heads: an ordinary call, whose results are exchanged.
Otherwise its queries are folded block by block. The keys were gathered (*gather*), or travel around once more (*ring*).
Sums over queries are then summed over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import Call, valid_call, zero_hidden
from .._statistics.compute import fold_blocks, results_of
from .._statistics.definitions import SHAPES, STATISTICS, need_values
from .._statistics.totals import Computed, PartialCall
from .._statistics.vectors import TopK
from .._weights import row_numbers
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import exact_dtype, score_blocks
from ..masks._bound import bind
from ..masks._grid import Block
from ._collectives import exchange, step
from ._methods import Chunk, Operands, SharedCall
from ._ring import chunks_of_ring


def shared_call_of(operands: Operands, shared: SharedCall, chunks: Sequence[Chunk], lse: Tensor | None = None) -> Call:
    """The shared call as observers get it, with the queries, keys and values of this process.

    Args:
        operands: the query, key and value of this process.
        shared: the attention that was computed.
        chunks: the intervals of this process's queries, or some heads of the whole sequence.
        lse: (B, H, l) of this process's queries, instead of chunks, after a ring.
    """
    q, k, v = operands
    shared = replace(shared, environment=shared.environment._replace(gradients=False, autocast=False))
    grid = shared.grid
    options: dict[str, Any] = {**shared.options, "lse": False, "weights": None}
    positions = {"query_positions": grid.query_positions, "key_positions": grid.key_positions}
    # The positions are those of the shared call, and fit no grid of this process.
    local: dict[str, Any] = {**options, "mask": None, "query_positions": None, "key_positions": None}
    call = valid_call(Call(q, k, v, **local), shared.environment)
    if lse is not None:
        results = partial(_of_queries, shared, lambda values: chunks_of_ring(q, k, v if values else None, shared), lse)
    elif chunks[0].query.shape[1] == q.shape[1]:
        results = partial(_of_queries, shared, lambda _: chunks, None)
    else:
        query, key, value, offset, *_ = chunks[0]
        heads = shared.call_at(offset, query, key, value, lse=False, weights=None, **positions)
        results = partial(_of_heads, shared, zero_hidden(valid_call(heads, shared.environment)))
    mask = options.get("mask")
    of_all: dict[str, Any] = {**call.options, "mask": mask, **positions}
    made = PartialCall(q, k, v, **of_all, totals=shared, results=results)
    made.environment, made.layout_, made.bound_ = call.environment, call.layout, bind(mask, grid)
    return made


def _of_queries(
    shared: SharedCall,
    chunks: Callable[[bool], Iterable[Chunk]],
    lse: Tensor | None,
    call: Call,
    *arguments: Any,
) -> Computed:
    """Results of this process's queries over all keys, chunk by chunk.

    Args:
        shared, call: the shared call, and the same with the queries of this process.
        chunks: returns the chunks of the call in any order, with values if its argument is true.
        lse: (B, H, l) over all keys, if a chunk holds only some of their keys.
        arguments: the other arguments of `results_of`.
    """
    names, options, counted, queries = arguments
    batch, _, length, _ = call.query.shape
    column = call.query.new_ones(batch, 1, length, 1, dtype=torch.bool)
    if counted is not None:
        column = counted[:, None, shared.rows(shared.queries.length, call.query.device), None]
    statistics = [STATISTICS[name](call, options, column, queries, shared) for name in names]
    with_values = need_values(names)
    blocks = (_block_rows(shared, chunk, lse, call, column, with_values) for chunk in chunks(with_values))
    return fold_blocks(chain.from_iterable(blocks), statistics, call)


def _block_rows(
    shared: SharedCall, chunk: Chunk, lse: Tensor | None, call: Call, counted: Tensor, with_values: bool
) -> Iterator[BlockRows]:
    """The blocks of a chunk, as blocks of the call of all queries."""
    value = chunk.value if with_values else chunk.key
    of_chunk = shared.call_at(chunk.offset, chunk.query, chunk.key, value)
    of_chunk = zero_hidden(valid_call(of_chunk, shared.environment))
    group, offset = of_chunk.layout.group, chunk.offset
    for block, rows, query, key in score_blocks(of_chunk, dtype=exact_dtype(call)):
        batch, heads, columns = block.batch, block.heads, cast(slice, block.columns)
        place = _moved(rows, chunk.rows.start)
        shared_block = Block(call.grid, batch, heads, _moved(rows, offset.row), _moved(columns, offset.column))
        values = of_chunk.value[batch, heads.start // group : heads.stop // group, columns]
        row_lse = None if lse is None else lse[batch, heads, place, None]
        yield BlockRows(call, shared_block, place, query, key, counted[batch, :, place], values, row_lse)


def _of_heads(shared: SharedCall, heads: Call, call: Call, *arguments: Any) -> Computed:
    """Results of some heads of the whole sequence, which the processes exchange.

    `heads` is the call of these heads, with all queries and keys. The last argument is the chosen queries.
    """
    chosen = row_numbers(arguments[-1], shared.queries.length, "queries")

    def cut(shape: tuple[str, ...], tensor: Tensor, rank: int) -> Tensor:
        if "n" in shape and chosen is not None:
            indices = torch.isin(chosen, shared.queries.positions(rank, chosen.device)).nonzero()[:, 0]
            return tensor.index_select(shape.index("n"), indices.to(tensor.device))
        for size, shards in (("n", shared.queries), ("L", shared.queries), ("S", shared.keys)):
            if size in shape:
                return shards.take(tensor, shape.index(size), rank)
        return tensor

    return with_all_heads(results_of(heads, *arguments), shared.group, cut, shared.where)


def with_all_heads(computed: Computed, group: dist.ProcessGroup, cut: Callable[..., Tensor], where: str) -> Computed:
    """Results of some heads as those of all heads, which the processes hold in order; by one all-to-all.

    Each process has as many heads. `cut` returns the elements that go to a process, from a tensor, the names of its
    dimensions and the rank. `where` is the function that split the module, for messages.
    """
    named = [*computed.tensors.items(), ("sees", computed.sees)]
    shaped = [(SHAPES[name], x) for name, result in named for x in (result if isinstance(result, TopK) else (result,))]
    world = dist.get_world_size(group)
    cuts = [[cut(shape, tensor, rank).contiguous() for shape, tensor in shaped] for rank in range(world)]
    sent = [[x.view(-1).view(torch.uint8) for x in of_rank] for of_rank in cuts]
    local_cuts = cuts[dist.get_rank(group)]
    shapes = [(x.numel() * x.element_size(),) for x in local_cuts]
    with step("statistics: all-to-all", where):
        received = iter(exchange(sent, [shapes] * world, group))
    of_ranks = [[next(received).clone().view(like.dtype).view(like.shape) for like in local_cuts] for _ in range(world)]
    joined = iter(
        torch.cat(of_heads, 1) if "H" in shape else torch.stack(of_heads).mean(0)
        for (shape, _), of_heads in zip(shaped, zip(*of_ranks, strict=True), strict=True)
    )
    tensors = {
        name: TopK(next(joined), next(joined)) if isinstance(result, TopK) else next(joined)
        for name, result in computed.tensors.items()
    }
    return Computed(tensors, next(joined))


def _moved(place: slice, by: int) -> slice:
    return slice(place.start + by, place.stop + by)
