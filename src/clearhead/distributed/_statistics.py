"""Statistics of a call of which this process holds some queries and keys.

With the method *heads* the process has all queries of some heads: an ordinary call, whose results are exchanged.
Otherwise its queries are folded block by block. The keys were gathered (*gather*), or travel around once more (*ring*).
Sums over queries are then summed over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import AttentionCall, valid_call, zero_hidden
from .._call.request import Request
from .._statistics.compute import fold_blocks, results_of
from .._statistics.definitions import STATISTICS, need_values, shape_of
from .._statistics.statistic import Options
from .._statistics.totals import Totals
from .._statistics.vectors import TopK
from .._weights import Queries, row_numbers
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import exact_dtype, score_blocks
from ..masks._grid import Block
from ._collectives import all_reduce_max, exchange, reduce_scatter, step
from ._methods import Chunk, Operands, Whole
from ._ring import chunks_of_ring


@final
@dataclass(frozen=True)
class OverProcesses:
    """The `Totals` over the processes of a sequence."""

    whole: Whole

    def rows(self, length: int, device: torch.device) -> Tensor:
        return self.whole.queries.positions(self.whole.rank, device)

    def summed(self, total: Tensor) -> Tensor:
        summed = total.clone(memory_format=torch.contiguous_format)
        with step("statistics: all-reduce", self.whole.where):
            dist.all_reduce(summed, group=self.whole.group)
        return summed

    def largest(self, total: Tensor) -> Tensor:
        with step("statistics: all-reduce", self.whole.where):
            return all_reduce_max(total, self.whole.group)

    def of_keys(self, total: Tensor) -> Tensor:
        keys, rank, last = self.whole.keys, self.whole.rank, total.dim() - 1
        sent = total.new_zeros(keys.world_size, *total.shape[:last], keys.longest)
        for other in range(keys.world_size):
            sent[other, ..., : keys.lengths[other]] = keys.take(total, last, other)
        with step("statistics: reduce-scatter", self.whole.where):
            return reduce_scatter(sent, self.whole.group)[..., : keys.lengths[rank]]


@final
@dataclass(frozen=True)
class _OfQueries:
    """The `CallPart` of a process that computes its queries over all keys, chunk by chunk.

    Args:
        whole: the attention that is computed.
        chunks: returns the chunks of the call in any order, with values if its argument is true.
        lse: (B, H, l) of whole rows, if a chunk holds only some of their keys.
    """

    whole: Whole
    chunks: Callable[[bool], Iterable[Chunk]]
    lse: Tensor | None

    @property
    def totals(self) -> Totals:
        return OverProcesses(self.whole)

    def results(
        self,
        call: AttentionCall,
        names: Sequence[str],
        options: Options,
        counted: Tensor | None,
        queries: Queries | None,
    ) -> dict[str, Any]:
        batch, _, length, _ = call.query.shape
        here = self.totals.rows(self.whole.queries.length, call.query.device)
        column = call.query.new_ones(batch, 1, length, 1, dtype=torch.bool)
        if counted is not None:
            column = counted[:, None, here, None]
        statistics = [STATISTICS[name](call, options, column, queries, self.totals) for name in names]
        return fold_blocks(self._blocks(call, column, need_values(names)), statistics, call)

    def _blocks(self, whole: AttentionCall, counted: Tensor, with_values: bool) -> Iterator[BlockRows]:
        for chunk in self.chunks(with_values):
            first, row, column = chunk.rows.start, chunk.offset.row, chunk.offset.column
            request = Request(self.whole.mask_at(chunk.offset), whole.spec.scale, whole.spec.softcap)
            value = chunk.value if with_values else None
            call = zero_hidden(valid_call(chunk.query, chunk.key, value, request, self.whole.environment))
            for block, rows, query, key in score_blocks(call, dtype=exact_dtype(whole)):
                place, ends = _moved(rows, first), cast(slice, block.columns)
                of_heads = slice(block.heads.start // call.spec.group, block.heads.stop // call.spec.group)
                yield BlockRows(
                    whole,
                    Block(whole.grid, block.batch, block.heads, _moved(rows, row), _moved(ends, column)),
                    place,
                    query,
                    key,
                    counted[block.batch, :, place],
                    call.value[block.batch, of_heads, ends],
                    None if self.lse is None else self.lse[block.batch, block.heads, place, None],
                )


@final
@dataclass(frozen=True)
class _OfSomeHeads:
    """The `CallPart` of a process that computes some heads of the whole sequence.

    Args:
        whole: the attention that is computed.
        call: the call of these heads, with all queries and all keys.
    """

    whole: Whole
    call: AttentionCall

    @property
    def totals(self) -> Totals:
        return OverProcesses(self.whole)

    def results(
        self,
        call: AttentionCall,
        names: Sequence[str],
        options: Options,
        counted: Tensor | None,
        queries: Queries | None,
    ) -> dict[str, Any]:
        chosen = row_numbers(queries, self.whole.queries.length, "queries")
        own = results_of(self.call, names, options, counted, queries)

        def cut(name: str, tensor: Tensor, rank: int) -> Tensor:
            shape, parts = shape_of(name), self.whole.queries
            if "n" in shape and chosen is not None:
                there = torch.isin(chosen, parts.positions(rank, chosen.device)).nonzero()[:, 0]
                return tensor.index_select(shape.index("n"), there.to(tensor.device))
            for size, split in (("n", parts), ("L", parts), ("S", self.whole.keys)):
                if size in shape:
                    return split.take(tensor, shape.index(size), rank)
            return tensor

        return with_all_heads(own, self.whole.group, cut, "context_parallel")


def shared_call(operands: Operands, whole: Whole, chunks: Sequence[Chunk], lse: Tensor | None = None) -> AttentionCall:
    """The call of the whole as observers get it, with the queries, keys and values of this process.

    Args:
        operands: the query, key and value of this process.
        whole: the attention that was computed.
        chunks: the runs of this process's queries, or some heads of the whole sequence.
        lse: (B, H, l) of this process's queries, instead of chunks, after a ring.
    """
    q, k, v = operands
    whole = replace(whole, environment=whole.environment._replace(gradients=False, autocast=False))
    grid, request = whole.grid, whole.request._replace(lse=False, weights=None)
    positions = {"query_positions": grid.query_positions, "key_positions": grid.key_positions}
    own = request._replace(mask=None, query_positions=None, key_positions=None)  # those of this process are in no grid
    call = valid_call(q, k, v, own, whole.environment)
    part: _OfQueries | _OfSomeHeads
    if lse is not None:
        part = _OfQueries(whole, lambda values: chunks_of_ring(q, k, v if values else None, whole), lse)
    elif chunks[0].query.shape[1] == q.shape[1]:
        part = _OfQueries(whole, lambda _: chunks, None)
    else:
        query, key, value, offset, *_ = chunks[0]
        heads = whole.request_at(offset, query.shape[1])._replace(lse=False, weights=None, **positions)
        part = _OfSomeHeads(whole, zero_hidden(valid_call(query, key, value, heads, whole.environment)))
    return replace(call, request=call.request._replace(mask=whole.mask, **positions), part=part, grid_=grid)


def with_all_heads(
    results: dict[str, Any], group: dist.ProcessGroup, cut: Callable[[str, Tensor, int], Tensor], where: str
) -> dict[str, Any]:
    """Results of some heads as those of all heads, which the processes hold in order; by one all-to-all.

    Args:
        results: tensors and `TopK` by name, (B, h, …); ``head_average`` (B, …) of as many heads on each process.
        group: of the processes.
        cut: what of a named tensor goes to a process.
        where: the function that split the module, for messages.
    """
    flat: dict[str, Tensor] = {}
    for name, found in results.items():
        flat |= (
            {name: found} if isinstance(found, Tensor) else {f"{name}.{key}": x for key, x in found._asdict().items()}
        )
    world, rank = dist.get_world_size(group), dist.get_rank(group)

    def cuts(other: int) -> list[Tensor]:
        return [cut(name.partition(".")[0], tensor, other).contiguous() for name, tensor in flat.items()]

    sent = [[piece.view(-1).view(torch.uint8) for piece in cuts(other)] for other in range(world)]
    own = cuts(rank)
    sizes = [piece.numel() * piece.element_size() for piece in own]
    with step("statistics: all-to-all", where):
        arrived = iter(exchange(sent, [[(size,) for size in sizes]] * world, group))
    received = [[next(arrived) for _ in sizes] for _ in range(world)]
    whole: dict[str, Tensor] = {}
    for number, (name, like) in enumerate(zip(flat, own, strict=True)):
        each = [part[number].clone().view(like.dtype).view(like.shape) for part in received]
        whole[name] = torch.cat(each, 1) if "H" in shape_of(name) else torch.stack(each).mean(0)
    joined: dict[str, Any] = {name: whole[name] for name in results if name in whole}
    for name, found in results.items():
        if isinstance(found, TopK):
            joined[name] = TopK(whole[f"{name}.indices"], whole[f"{name}.weights"])
    return joined


def _moved(place: slice, by: int) -> slice:
    return slice(place.start + by, place.stop + by)
