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
        ((slice(0, 4, None),), (slice(0, 2, None), slice(6, 7, None)))
    """

    length: int
    world_size: int
    layout: Layout

    @cached_property
    def intervals(self) -> tuple[tuple[slice, ...], ...]:
        """For each process its positions in ascending order, as intervals. No interval is empty."""
        count = self.world_size if self.layout == "contiguous" else 2 * self.world_size
        least, remainder = divmod(self.length, count)
        bounds = [index * least + min(index, remainder) for index in range(count + 1)]
        parts = [slice(*ends) for ends in pairwise(bounds)]
        if self.layout == "contiguous":
            return tuple(_joined(interval) for interval in parts)
        return tuple(_joined(*pair) for pair in zip(parts[: self.world_size], reversed(parts), strict=False))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each process."""
        return tuple(sum(map(_size, intervals)) for intervals in self.intervals)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """The positions of a process, (length of its shard,)."""
        return self.take(torch.arange(self.length, device=device), 0, rank)

    def columns(self, rank: int, device: torch.device) -> range | Tensor:
        """The positions of a process, as a range if they are one interval."""
        intervals = self.intervals[rank] or (slice(0, 0),)
        return range(intervals[0].start, intervals[0].stop) if len(intervals) == 1 else self.positions(rank, device)

    def take(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The shard of a process, from a tensor with the whole sequence. It is a view if it is one interval."""
        intervals = self.intervals[rank] or (slice(0, 0),)
        views = [tensor.narrow(dim, interval.start, _size(interval)) for interval in intervals]
        return views[0] if len(views) == 1 else torch.cat(views, dim)

    def split(self, tensor: Tensor, dim: int) -> list[list[Tensor]]:
        """The intervals of each process, as views of a tensor with the whole sequence. Empty shards are one view."""
        shards: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        views = tensor.split([_size(interval) for interval, _ in self._in_order], dim)
        for (_, rank), view in zip(self._in_order, views, strict=True):
            shards[rank].append(view)
        return [views or [tensor.narrow(dim, 0, 0)] for views in shards]

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence, a new tensor, from the shards of all processes. A shard may be padded at its end."""
        views = [
            iter(shard.split([*map(_size, intervals), shard.shape[dim] - length], dim))
            for shard, intervals, length in zip(shards, self.intervals, self.lengths, strict=True)
        ]
        ordered = [next(views[rank]) for _, rank in self._in_order]
        return torch.cat(ordered or [shards[0].narrow(dim, 0, 0)], dim)

    @cached_property
    def _in_order(self) -> list[tuple[slice, int]]:
        """All intervals in the order of the sequence, and the process of each."""
        pairs = [(interval, rank) for rank, intervals in enumerate(self.intervals) for interval in intervals]
        return sorted(pairs, key=lambda pair: pair[0].start)


def _size(interval: slice) -> int:
    return interval.stop - interval.start


def _joined(*intervals: slice) -> tuple[slice, ...]:
    """One or two intervals in ascending order, without empty ones. Neighbours become one interval."""
    first, last = intervals[0], intervals[-1]
    if first.stop == last.start:
        intervals = (slice(first.start, last.stop),)
    return tuple(interval for interval in intervals if _size(interval))
