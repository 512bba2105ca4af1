"""Which positions of a sequence each process of a group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from .._checks import choice

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


def require_layout(layout: object) -> None:
    """Raise for an unknown layout."""
    choice("layout", layout, LAYOUTS)


@dataclass(frozen=True)
class Shards:
    """The shards of a sequence: the positions of each process. They are cut as `torch.tensor_split` cuts.

    Args:
        length: the length of the sequence.
        world_size: W, the number of processes.
        layout: ``"contiguous"`` gives process r part r of W. ``"zigzag"`` gives it parts r and 2W − 1 − r of 2W, so
            that every process has the same work under a causal mask.

    Example:
        >>> from clearhead.distributed._layout import Shards
        >>> Shards(7, 2, "contiguous").intervals[0], Shards(7, 2, "zigzag").intervals[0]
        ((range(0, 4),), (range(0, 2), range(6, 7)))
    """

    length: int
    world_size: int
    layout: Layout

    @cached_property
    def intervals(self) -> tuple[tuple[range, ...], ...]:
        """For each process its positions in ascending order, as intervals. An empty shard is one empty interval."""
        count = self.world_size if self.layout == "contiguous" else 2 * self.world_size
        least, remainder = divmod(self.length, count)
        bounds = [index * least + min(index, remainder) for index in range(count + 1)]
        cuts = [range(*ends) for ends in pairwise(bounds)]
        if self.layout == "contiguous":
            return tuple((interval,) for interval in cuts)
        return tuple(map(_joined, cuts[: self.world_size], reversed(cuts)))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each process."""
        return tuple(sum(map(len, intervals)) for intervals in self.intervals)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """The positions of a process, (length of its shard,)."""
        return self.take(torch.arange(self.length, device=device), 0, rank)

    def columns(self, rank: int, device: torch.device) -> range | Tensor:
        """The positions of a process, as a range if they are one interval."""
        first, *others = self.intervals[rank]
        return self.positions(rank, device) if others else first

    def take(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The shard of a process, from a tensor with the whole sequence. It is a view if it is one interval."""
        views = [tensor.narrow(dim, interval.start, len(interval)) for interval in self.intervals[rank]]
        return views[0] if len(views) == 1 else torch.cat(views, dim)

    def split(self, tensor: Tensor, dim: int) -> list[list[Tensor]]:
        """The intervals of each process, as views of a tensor with the whole sequence."""
        shards: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        views = tensor.split([len(interval) for interval, _ in self._in_order], dim)
        for (_, rank), view in zip(self._in_order, views, strict=True):
            shards[rank].append(view)
        return shards

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence, a new tensor, from the shards of all processes. A shard may be padded at its end."""
        views = [
            iter(shard.split([*map(len, intervals), shard.shape[dim] - length], dim))
            for shard, intervals, length in zip(shards, self.intervals, self.lengths, strict=True)
        ]
        return torch.cat([next(views[rank]) for _, rank in self._in_order], dim)

    @cached_property
    def _in_order(self) -> list[tuple[range, int]]:
        """All intervals in the order of the sequence, and the process of each."""
        pairs = [(interval, rank) for rank, intervals in enumerate(self.intervals) for interval in intervals]
        return sorted(pairs, key=lambda pair: pair[0].start)


def _joined(first: range, last: range) -> tuple[range, ...]:
    """The two intervals of a process. Neighbours become one, and an empty last one is left out."""
    if first.stop == last.start:
        return (range(first.start, last.stop),)
    return (first, last) if last else (first,)
