"""Which positions of a sequence each process of a group holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
        >>> Shards(7, 2, "contiguous").runs(0), Shards(7, 2, "zigzag").runs(0)
        ((slice(0, 4, None),), (slice(0, 2, None), slice(6, 7, None)))
    """

    length: int
    world_size: int
    layout: Layout

    def runs(self, rank: int) -> tuple[slice, ...]:
        """The positions of a process in ascending order, as runs without gaps. No run is empty."""
        return self._runs[rank]

    @cached_property
    def _runs(self) -> tuple[tuple[slice, ...], ...]:
        world = self.world_size
        if self.layout == "contiguous":
            return tuple(_joined(self._cut(world, rank)) for rank in range(world))
        return tuple(
            _joined(self._cut(2 * world, rank), self._cut(2 * world, 2 * world - 1 - rank)) for rank in range(world)
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each process."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self._runs)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """The positions of a process, (length of its shard,)."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.runs(rank)]
        return torch.cat(runs) if runs else torch.arange(0, device=device)

    def take(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The shard of a process, from a tensor with the whole sequence."""
        runs = [tensor.narrow(dim, run.start, run.stop - run.start) for run in self.runs(rank)]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs, dim) if runs else tensor.narrow(dim, 0, 0)

    def split(self, tensor: Tensor, dim: int) -> list[list[Tensor]]:
        """The runs of each process, as views of a tensor with the whole sequence. An empty shard is one empty run."""
        order = self._in_order()
        shards: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for (_, rank), run in zip(order, tensor.split([run.stop - run.start for run, _ in order], dim), strict=True):
            shards[rank].append(run)
        return [runs or [tensor.narrow(dim, 0, 0)] for runs in shards]

    def join(self, shards: list[Tensor], dim: int) -> Tensor:
        """The whole sequence, a new tensor, from the shards of all processes. A shard may be padded at its end."""
        cut = [
            iter(shard.split([*(run.stop - run.start for run in runs), shard.shape[dim] - length], dim))
            for shard, runs, length in zip(shards, self._runs, self.lengths, strict=True)
        ]
        ordered = [next(cut[rank]) for _, rank in self._in_order()]
        return torch.cat(ordered or [shards[0].narrow(dim, 0, 0)], dim)

    def _in_order(self) -> list[tuple[slice, int]]:
        """All runs in the order of the sequence, and the process of each."""
        pairs = [(run, rank) for rank, runs in enumerate(self._runs) for run in runs]
        return sorted(pairs, key=lambda pair: pair[0].start)

    def _cut(self, count: int, index: int) -> slice:
        least, more = divmod(self.length, count)
        start = index * least + min(index, more)
        return slice(start, start + least + (index < more))


def _joined(*runs: slice) -> tuple[slice, ...]:
    """Runs in ascending order, without empty ones. Two neighbours become one run."""
    joined: list[slice] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)
