"""Statistics of a call of which this process holds some queries and keys.

With the method *heads* the process has all queries of some heads: an ordinary call, whose results are exchanged.
Otherwise its queries are folded block by block. The keys were gathered (*gather*), or travel around once more (*ring*).
Sums over queries are then summed over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import AttentionCall, valid_call, zero_hidden
from .._call.request import Request
from .._statistics.compute import fold_blocks, results_of
from .._statistics.definitions import STATISTICS, Options, Statistic, TopK
from .._statistics.rows import BlockRows
from .._statistics.totals import ONE_PROCESS, Totals
from .._weights import Queries, row_numbers
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
        gathered: list[Statistic] = [STATISTICS[name](call, options, column) for name in names if name != "rows"]
        if "rows" in names:
            chosen = _chosen(queries, self.whole)
            slots = torch.full((self.whole.queries.length,), -1).index_copy_(0, here.cpu(), torch.arange(length))
            gathered.append(_ChosenRows(call, options, column, slots[chosen[torch.isin(chosen, here.cpu())]]))
        with_values = not {"output", "output_norm"}.isdisjoint(names)
        return fold_blocks(self._blocks(call, column, with_values), gathered, call, self.totals)

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
        chosen = _chosen(queries, self.whole) if "rows" in names else None
        own = results_of(self.call, names, options, counted, queries)

        def cut(name: str, tensor: Tensor, rank: int) -> Tensor:
            parts = self.whole.queries
            if name == "rows" and chosen is not None:
                there = torch.isin(chosen, parts.positions(rank, chosen.device)).nonzero()[:, 0]
                return tensor.index_select(2, there.to(tensor.device))
            of = _OF.get(name, "queries")
            if of == "heads":
                return tensor
            return (parts if of == "queries" else self.whole.keys).take(
                tensor, 1 if name == "head_average" else 2, rank
            )

        return with_all_heads(own, self.whole.group, cut, "context_parallel")


#: The axis of each result: queries, keys, or neither.
_OF: dict[str, Literal["queries", "keys", "heads"]] = {
    name: kind.of for kind in STATISTICS.values() for name in (*kind.per_head, kind.name)
}


@final
class _ChosenRows(Statistic):
    """The weights of chosen rows, (B, H, n, S)."""

    def __init__(self, call: AttentionCall, options: Options, counted: Tensor | None, places: Tensor) -> None:
        super().__init__(call, options, counted)
        self._places = places  # (n,), among the rows that are here
        self._weights = self.zeros(*self.row_shape[:2], len(places), self.column_shape[2])

    def add(self, rows: BlockRows) -> None:
        there = ((self._places >= rows.place.start) & (self._places < rows.place.stop)).nonzero()[:, 0]
        if len(there):
            target = self._weights[rows.block.batch, rows.block.heads, :, rows.columns]
            target[:, :, there] = rows.weights[:, :, self._places[there] - rows.place.start]

    def result(self, totals: Totals = ONE_PROCESS) -> dict[str, Any]:
        return {"rows": self._weights}


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
        whole[name] = torch.stack(each).mean(0) if name == "head_average" else torch.cat(each, 1)
    joined: dict[str, Any] = {name: whole[name] for name in results if name in whole}
    for name, found in results.items():
        if isinstance(found, TopK):
            joined[name] = TopK(whole[f"{name}.indices"], whole[f"{name}.weights"])
    return joined


def _chosen(queries: Queries | None, whole: Whole) -> Tensor:
    """Numbers of the chosen queries of the whole, on the CPU."""
    length = whole.queries.length
    chosen = row_numbers(queries, length, "queries")
    return torch.arange(length) if chosen is None else chosen.cpu()


def _moved(place: slice, by: int) -> slice:
    return slice(place.start + by, place.stop + by)
