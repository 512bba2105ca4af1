"""Statistics of a call of which this process holds some queries and keys.

Where the method gave it whole queries of some heads (*heads*), these are an ordinary call, whose results are exchanged.
Otherwise its queries are folded block by block, as keys were gathered (*gather*) or come around once more (*ring*), and
what is added up over queries is added up over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import AttentionCall, valid_call, zero_hidden
from .._call.request import Request
from .._environment import Environment
from .._statistics.compute import fold_blocks, results_of
from .._statistics.definitions import STATISTICS, need_values, shape_of
from .._statistics.statistic import Options
from .._statistics.totals import Totals
from .._statistics.vectors import TopK
from .._weights import Queries, row_numbers
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import exact_dtype, score_blocks
from ..masks._grid import Block
from ._collectives import all_reduce_max, exchange, step, sum_of_own
from ._methods import Operands, Piece, Whole
from ._ring import pieces_of_ring


@final
@dataclass(frozen=True)
class OverProcesses:
    """The `Totals` over the processes of a sequence."""

    whole: Whole

    def rows(self, length: int, device: torch.device) -> Tensor:
        return self.whole.queries.positions(self.whole.rank, device)

    def summed(self, total: Tensor) -> Tensor:
        found = total.clone(memory_format=torch.contiguous_format)
        with step("statistics: all-reduce", self.whole.where):
            dist.all_reduce(found, group=self.whole.group)
        return found

    def largest(self, total: Tensor) -> Tensor:
        with step("statistics: all-reduce", self.whole.where):
            return all_reduce_max(total, self.whole.group)

    def of_keys(self, total: Tensor) -> Tensor:
        keys, rank, last = self.whole.keys, self.whole.rank, total.dim() - 1
        sent = total.new_zeros(keys.world_size, *total.shape[:last], keys.longest)
        for other in range(keys.world_size):
            sent[other, ..., : keys.lengths[other]] = keys.take(total, last, other)
        with step("statistics: reduce-scatter", self.whole.where):
            return sum_of_own(sent, self.whole.group)[..., : keys.lengths[rank]]


class Computed(NamedTuple):
    """What a method has computed.

    Args:
        calls: ordinary calls: of each run of this process's queries, or of some heads.
        lse: (B, H, l) of its queries, instead, where keys came one after the other.
    """

    calls: list[Operands]
    lse: Tensor | None = None


@final
@dataclass(frozen=True)
class _OfOwnQueries:
    """The `CallPart` of a process that computes its queries over all keys, piece by piece.

    Args:
        whole: what is computed.
        pieces: those of the call, in any order, with values if they are wanted.
        lse: (B, H, l) of whole rows, where pieces hold some of their keys.
        environment: of the call.
    """

    whole: Whole
    pieces: Callable[[bool], Iterator[Piece]]
    lse: Tensor | None
    environment: Environment

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
        for piece in self.pieces(with_values):
            first, row, column = piece.rows.start, piece.offset.row, piece.offset.column
            request = Request(piece.mask, whole.spec.scale, whole.spec.softcap)
            value = piece.value if with_values else None
            call = zero_hidden(valid_call(piece.query, piece.key, value, request, self.environment))
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
        whole: what is computed.
        call: of these heads, all queries and all keys.
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


def shared_call(
    operands: tuple[Tensor, Tensor, Tensor],
    whole: Whole,
    computed: Computed,
    environment: Environment,
) -> AttentionCall:
    """The call as observers are shown it: of the whole, with the queries, keys and values of this process."""
    q, k, v = operands
    grid, request = whole.grid, whole.request._replace(lse=False, weights=None)
    positions = {"query_positions": grid.query_positions, "key_positions": grid.key_positions}
    own = request._replace(mask=None, query_positions=None, key_positions=None)  # those of this process are in no grid
    call = valid_call(q, k, v, own, environment)
    part: _OfOwnQueries | _OfSomeHeads
    if computed.lse is not None:
        part = _OfOwnQueries(whole, partial(_around, q, k, v, whole), computed.lse, environment)
    elif computed.calls[0].query.shape[1] == q.shape[1]:
        part = _OfOwnQueries(whole, lambda _: _gathered(computed.calls, whole), None, environment)
    else:
        query, key, value, offset = computed.calls[0]
        heads = whole.request_at(offset, query.shape[1])._replace(lse=False, weights=None, **positions)
        part = _OfSomeHeads(whole, zero_hidden(valid_call(query, key, value, heads, environment)))
    return replace(call, request=call.request._replace(mask=whole.mask, **positions), part=part, grid_=grid)


def _around(q: Tensor, k: Tensor, v: Tensor, whole: Whole, with_values: bool) -> Iterator[Piece]:
    return pieces_of_ring(q, k, v if with_values else None, whole)


def _gathered(calls: Sequence[Operands], whole: Whole) -> Iterator[Piece]:
    """The runs of this process's queries, each with all keys."""
    start = 0
    for query, key, value, offset in calls:
        rows, columns = slice(start, start + query.shape[2]), slice(0, key.shape[2])
        start = rows.stop
        yield Piece(query, key, value, whole.mask_at(offset), rows, columns, offset)


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
