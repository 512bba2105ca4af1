"""How queries of one part of a sequence attend to the keys of all parts: *heads* and *gather*.

Each method gets this process's queries, keys and values, and computes ordinary attention of larger tensors, with a mask
that knows where these stand in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import Results
from .._call.request import Request
from ..masks._base import Mask
from ..masks._grid import Grid, Offset
from ..masks._part import part_of
from ._agreement import fingerprint
from ._collectives import all_to_all, gather_parts
from ._layout import Parts

#: Attention of query, key and value, which lie at an offset in the whole.
Attend = Callable[[Tensor, Tensor, Tensor, Offset], Results]


@dataclass(frozen=True)
class Whole:
    """The attention of which each process computes a part.

    Args:
        group: of the processes.
        rank: of this one.
        queries, keys: which positions each process holds.
        grid: sizes and positions of all queries and keys, and of the module's heads that this process computes.
        request: how they attend. Its mask and sinks are of all of them. Its offset is where these heads lie in those of
            the module.
        where: the function that split it, for messages.
    """

    group: dist.ProcessGroup
    rank: int
    queries: Parts
    keys: Parts
    grid: Grid
    request: Request
    where: str = "context_parallel"

    @property
    def mask(self) -> Mask | None:
        return cast("Mask | None", self.request.mask)

    @property
    def start(self) -> Offset:
        """The first head, query and key."""
        return Offset(self.grid.num_heads)

    def mask_at(self, offset: Offset) -> Mask | None:
        """The mask of a call that lies at an offset in the whole."""
        return part_of(self.mask, offset, self.grid)

    def request_at(self, offset: Offset, num_heads: int) -> Request:
        """The request of a call of so many heads that lies at an offset in the whole."""
        sinks, module = self.request.sinks, self.request.offset
        return self.request._replace(
            mask=self.mask_at(offset),
            sinks=None if sinks is None else sinks[offset.head : offset.head + num_heads],
            query_positions=None,
            key_positions=None,
            offset=module and offset._replace(num_heads=module.num_heads, head=module.head + offset.head),
        )


class Operands(NamedTuple):
    """What an ordinary call was computed of: query, key, value, and where they lie in the whole."""

    query: Tensor
    key: Tensor
    value: Tensor
    offset: Offset


@dataclass(frozen=True)
class Piece:
    """A run of this process's queries and a run of keys.

    Args:
        query, key, value: (B, H, l, D), (B, Hkv, s, D), (B, Hkv, s, Dv).
        mask: of them.
        rows, columns: which of this process's queries, and of the keys that are here.
        offset: where they lie in the whole.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    rows: slice
    columns: slice
    offset: Offset


def by_gathering(q: Tensor, k: Tensor, v: Tensor, whole: Whole, attend: Attend) -> Results:
    """Every process gathers all keys and values: one all-gather, and one reduce-scatter of their gradients."""
    return _in_a_row([attend(*operands) for operands in runs_of_queries(q, k, v, whole)])


def runs_of_queries(q: Tensor, k: Tensor, v: Tensor, whole: Whole) -> Iterator[Operands]:
    """Each run of this process's queries, with all keys and values: a call of its own, so that masks stay bands."""
    rows = [x.permute(2, 0, 1, 3) for x in (k, v)]  # (s, B, Hkv, D) and (s, B, Hkv, Dv)
    gathered = gather_parts(rows, whole.keys, whole.group, whole.where)
    keys, values = (x.permute(1, 2, 0, 3) for x in gathered)  # (B, Hkv, S, D) and (B, Hkv, S, Dv)
    start = 0
    # A process without queries computes an empty call: the others wait for its part of the keys' gradients.
    for run in whole.queries.runs(whole.rank) or (slice(0, 0),):
        count = run.stop - run.start
        yield Operands(q[:, :, start : start + count], keys, values, whole.start._replace(row=run.start))
        start += count


def _in_a_row(found: list[Results]) -> Results:
    """The results of runs of queries as those of all of them."""
    if len(found) == 1:
        return found[0]
    weights = [results.weights for results in found if results.weights is not None]
    return Results(
        torch.cat([results.output for results in found], 2), None, torch.cat(weights, -2) if weights else None
    )


def like_whole(operands: tuple[Tensor, Tensor, Tensor], queries: Parts, keys: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the whole without their values, by which a call of it is checked: one row, expanded."""
    q, k, v = operands
    lengths = (q, queries.length), (k, keys.length), (v, keys.length)
    q, k, v = (x.new_empty(x.shape[3]).expand(*x.shape[:2], length, -1) for x, length in lengths)
    return q, k, v


def mask_fact(mask: Mask | None) -> int:
    """What is equal in every process of a mask: all but the values of large tensors."""
    return fingerprint(None if mask is None else (mask.describe(), str(mask.sizes())))


def heads_divide(num_heads: int, num_kv_heads: int, world: int) -> bool:
    """Whether every process can take as many heads, with whole key/value heads for them."""
    return num_heads % world == 0 and (num_kv_heads % world == 0 or world % num_kv_heads == 0)


def by_heads(q: Tensor, k: Tensor, v: Tensor, whole: Whole, attend: Attend) -> Results:
    """Each process takes some heads of the whole sequence (Jacobs et al., "DeepSpeed Ulysses", 2023).

    One exchange of queries, keys and values, and one of the outputs. A key/value head that several processes need is
    sent to each of them.
    """
    world, batch = whole.queries.world_size, q.shape[0]
    sent, widths = [], []
    for x in (q, k, v):
        heads = max(x.shape[1] // world, 1)
        of_heads = x.permute(2, 0, 1, 3).split(heads, 2)  # (l, B, H / W, D) each
        if len(of_heads) < world:  # views of one tensor, so that half precision rounds the sum of their gradients once
            copies = world // len(of_heads)
            of_heads = [copy for part in of_heads for copy in part.expand(copies, *part.shape)]
        sent.append(of_heads)
        widths.append((batch, heads, x.shape[3]))
    parts = whole.queries, whole.keys, whole.keys
    shapes = [
        [(part.lengths[rank], *width) for part, width in zip(parts, widths, strict=True)] for rank in range(world)
    ]
    received = all_to_all(list(zip(*sent, strict=True)), shapes, whole.group)
    q_all, k_all, v_all = (
        part.join(list(each), 0).permute(1, 2, 0, 3)
        for part, each in zip(parts, zip(*received, strict=True), strict=True)
    )  # (B, H / W, L, D), (B, Hkv / W or 1, S, D) and (…, Dv)
    results = attend(q_all, k_all, v_all, whole.start._replace(head=whole.rank * q_all.shape[1]))
    return Results(_rows_back(results.output, whole))


def _rows_back(output: Tensor, whole: Whole) -> Tensor:
    """(B, H / W, L, Dv) of this process's heads → (B, H, l, Dv) of its queries."""
    batch, heads, _, dim = output.shape
    sent = whole.queries.split(output.permute(2, 0, 1, 3), 0)  # (l, B, H / W, Dv), in runs
    shape = whole.queries.lengths[whole.rank], batch, heads, dim
    received = all_to_all(sent, [[shape]] * whole.queries.world_size, whole.group)
    of_heads = [x[0] if len(x) == 1 else torch.cat(x) for x in received]  # the own ones are in runs
    # In memory as the output projection reads it.
    return torch.cat([x.transpose(0, 1) for x in of_heads], 2).transpose(1, 2)
