"""The methods *heads* and *gather*: how the queries of one shard attend to the keys of all shards.

Each method takes the queries, keys and values of this process. It computes ordinary attention of larger tensors, with a
mask that knows where these lie in the shared call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import Call, Results
from .._environment import Environment
from .._layer.plan import attend
from ..masks._base import Mask
from ..masks._bound import BoundMask, bind
from ..masks._grid import Grid, Offset
from ..masks._part import part_of
from ._agreement import fingerprint
from ._collectives import WHERE, all_to_all, gather_shards, reduce_scatter_shards, step
from ._layout import Shards

Method = Literal["auto", "heads", "gather", "ring"]
METHODS: tuple[Method, ...] = ("auto", "heads", "gather", "ring")

#: Query (B, H, l, D), key (B, Hkv, s, D) and value (B, Hkv, s, Dv) of this process.
Operands = tuple[Tensor, Tensor, Tensor]


class Chunk(NamedTuple):
    """Some queries and keys, whose attention is one ordinary call.

    Args:
        query, key, value: (B, h, l, D), (B, hkv, s, D), (B, hkv, s, Dv).
        offset: where the chunk lies in the shared call.
        rows: its queries, among the queries of this process.
        columns: its keys, among the keys that this process holds at that moment.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    offset: Offset
    rows: slice = slice(None)
    columns: slice = slice(None)


@dataclass(frozen=True)
class SharedCall:
    """One attention call that the processes of a group compute together, and its `Totals` over them.

    Args:
        group: the group of the processes.
        rank: the rank of this process.
        queries, keys: the positions that each process holds.
        grid: sizes and positions of all queries and keys, and of the heads of the module that this process computes.
        options: how they attend, by the names of `Call`. Its mask and sinks belong to all queries. Its offset is
            the place of these heads among those of the module.
        environment: the environment of the call.
        where: the function that split the module, for messages.
    """

    group: dist.ProcessGroup
    rank: int
    queries: Shards
    keys: Shards
    grid: Grid
    options: dict[str, Any]
    environment: Environment
    where: str = WHERE

    @property
    def start(self) -> Offset:
        """The first head, query and key."""
        return Offset(self.grid.num_heads)

    @cached_property
    def _bound(self) -> BoundMask:
        """The mask of all queries and keys, of which each chunk has a part."""
        return bind(self.options.get("mask"), self.grid)

    def mask_at(self, offset: Offset) -> Mask | None:
        """The mask of a call that lies at an offset in this one."""
        return part_of(self._bound, offset)

    def call_at(self, offset: Offset, query: Tensor, key: Tensor, value: Tensor, **changes: Any) -> Call:
        """A call that lies at an offset in this one."""
        sinks, module = self.options.get("sinks"), self.options.get("offset")
        of_part: dict[str, Any] = {
            "mask": self.mask_at(offset),
            "sinks": None if sinks is None else sinks[offset.head : offset.head + query.shape[1]],
            "query_positions": None,
            "key_positions": None,
            "offset": module and offset._replace(num_heads=module.num_heads, head=module.head + offset.head),
        }
        return Call(query, key, value, **{**self.options, **of_part, **changes})

    def rows(self, length: int, device: torch.device) -> Tensor:
        return self.queries.positions(self.rank, device)

    def summed(self, total: Tensor) -> Tensor:
        return self._reduced(total, dist.ReduceOp.SUM)

    def maximum(self, total: Tensor) -> Tensor:
        return self._reduced(total, dist.ReduceOp.MAX)

    def _reduced(self, total: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = total.clone(memory_format=torch.contiguous_format)
        with step("statistics: all-reduce", self.where):
            dist.all_reduce(reduced, operation, group=self.group)
        return reduced

    def of_keys(self, total: Tensor) -> Tensor:
        with step("statistics: reduce-scatter", self.where):
            (summed,) = reduce_scatter_shards([total.movedim(-1, 0)], self.keys, self.group)
        return summed.movedim(0, -1)

    def attend(self, chunk: Chunk) -> Results:
        """The attention of a chunk."""
        query, key, value, offset, *_ = chunk
        # A fused kernel refuses an empty call, which computes nothing.
        is_empty = 0 in (query.shape[2], key.shape[2])
        environment = self.environment._replace(kernel=None) if is_empty else self.environment
        return attend(self.call_at(offset, query, key, value), environment)


def by_gathering(q: Tensor, k: Tensor, v: Tensor, shared: SharedCall) -> tuple[Results, list[Chunk]]:
    """Every process gathers all keys and values: one all-gather, and one reduce-scatter of their gradients.

    Returns:
        The results, and the chunks that they were computed from.
    """
    chunks = chunks_of_queries(q, k, v, shared)
    results = [shared.attend(chunk) for chunk in chunks]
    if len(results) == 1:
        return results[0], chunks
    output = torch.cat([of_chunk.output for of_chunk in results], 2)  # (B, H, l, Dv)
    weights = [of_chunk.weights for of_chunk in results if of_chunk.weights is not None]
    return Results(output, None, torch.cat(weights, -2) if weights else None), chunks


def chunks_of_queries(q: Tensor, k: Tensor, v: Tensor, shared: SharedCall) -> list[Chunk]:
    """Each interval of this process's queries with all keys and values. The mask of one interval stays a band."""
    sequences = [x.permute(2, 0, 1, 3) for x in (k, v)]  # (s, B, Hkv, D) and (s, B, Hkv, Dv)
    gathered = gather_shards(sequences, shared.keys, shared.group, shared.where)
    keys, values = (x.permute(1, 2, 0, 3) for x in gathered)  # (B, Hkv, S, D) and (B, Hkv, S, Dv)
    chunks: list[Chunk] = []
    start = 0
    # A process without queries computes an empty call: the others wait for its gradients of the keys.
    for interval in shared.queries.intervals[shared.rank]:
        rows = slice(start, start + len(interval))
        chunks.append(Chunk(q[:, :, rows], keys, values, shared.start._replace(row=interval.start), rows))
        start = rows.stop
    return chunks


def of_all_sizes(operands: Operands, queries: Shards, keys: Shards) -> Operands:
    """Query, key and value with the sizes of the shared call and without its values, to check it: one row, expanded."""
    q, k, v = operands
    lengths = (q, queries.length), (k, keys.length), (v, keys.length)
    q, k, v = (x.new_empty(x.shape[3]).expand(*x.shape[:2], length, -1) for x, length in lengths)
    return q, k, v


def mask_fact(mask: Mask | None) -> int:
    """A fingerprint that is equal for equal masks. The values of large tensors are not compared."""
    return fingerprint(None if mask is None else (mask.describe(), str(mask.sizes())))


def heads_divide(num_heads: int, num_kv_heads: int, world: int) -> bool:
    """Whether every process can take as many heads, with whole key/value heads for them."""
    return num_heads % world == 0 and (num_kv_heads % world == 0 or world % num_kv_heads == 0)


def by_heads(q: Tensor, k: Tensor, v: Tensor, shared: SharedCall) -> tuple[Results, list[Chunk]]:
    """Each process computes some heads of the whole sequence (Jacobs et al., "DeepSpeed Ulysses", 2023).

    The processes exchange queries, keys and values once, and the outputs once. A key/value head that several processes
    need is sent to each of them.

    Returns:
        The results, and the chunk that they were computed from.
    """
    world, batch = shared.queries.world_size, q.shape[0]
    shards = shared.queries, shared.keys, shared.keys
    sent, widths = [], []
    for x in (q, k, v):
        heads = max(x.shape[1] // world, 1)
        of_heads = x.permute(2, 0, 1, 3).split(heads, 2)  # (l, B, H / W, D) each
        if len(of_heads) < world:  # views of one tensor, so that half precision rounds the sum of their gradients once
            copies = world // len(of_heads)
            of_heads = [copy for head in of_heads for copy in head.expand(copies, *head.shape)]
        sent.append(of_heads)
        widths.append((batch, heads, x.shape[3]))
    shapes = [
        [(shard.lengths[rank], *width) for shard, width in zip(shards, widths, strict=True)] for rank in range(world)
    ]
    received = all_to_all(list(zip(*sent, strict=True)), shapes, shared.group)
    q_all, k_all, v_all = (
        shard.join(tensors, 0).permute(1, 2, 0, 3)
        for shard, tensors in zip(shards, zip(*received, strict=True), strict=True)
    )  # (B, H / W, L, D), (B, Hkv / W or 1, S, D) and (…, Dv)
    chunk = Chunk(q_all, k_all, v_all, shared.start._replace(head=shared.rank * q_all.shape[1]))
    return Results(_to_shards(shared.attend(chunk).output, shared)), [chunk]


def _to_shards(output: Tensor, shared: SharedCall) -> Tensor:
    """(B, H / W, L, Dv) of this process's heads → (B, H, l, Dv) of its queries."""
    queries, (batch, heads, _, dim) = shared.queries, output.shape
    sent = queries.split(output.permute(2, 0, 1, 3), 0)  # (l, B, H / W, Dv), in intervals
    shape = queries.lengths[shared.rank], batch, heads, dim
    received = all_to_all(sent, [[shape]] * queries.world_size, shared.group)
    of_heads = [x[0] if len(x) == 1 else torch.cat(x) for x in received]  # this process's queries are in intervals
    # In memory as the output projection reads it.
    return torch.cat([x.transpose(0, 1) for x in of_heads], 2).transpose(1, 2)
