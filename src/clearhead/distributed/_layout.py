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
class Parts:
    """A sequence of some length as the parts of a group's processes; cut as `torch.tensor_split` cuts.

    Args:
        length: of the sequence.
        world_size: W, processes in the group.
        layout: ``"contiguous"``: part r of W. ``"zigzag"``: parts r and 2W − 1 − r of 2W, which under a causal mask is
            the same work for every process.

    Example:
        >>> from clearhead.distributed._layout import Parts
        >>> Parts(7, 2, "contiguous").runs(0), Parts(7, 2, "zigzag").runs(0)
        ((slice(0, 4, None),), (slice(0, 2, None), slice(6, 7, None)))
    """

    length: int
    world_size: int
    layout: Layout

    def runs(self, rank: int) -> tuple[slice, ...]:
        """The positions of a process in ascending order, as runs without gaps; none is empty."""
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
        """How many positions each process holds."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self._runs)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """The positions of a process, (length of its part,)."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.runs(rank)]
        return torch.cat(runs) if runs else torch.arange(0, device=device)

    def take(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """A process's part of a tensor that holds the whole sequence."""
        parts = [tensor.narrow(dim, run.start, run.stop - run.start) for run in self.runs(rank)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)

    def split(self, tensor: Tensor, dim: int) -> list[list[Tensor]]:
        """What each process holds of a tensor with the whole sequence: its runs, views; one empty for no run."""
        order = self._in_order()
        cut = tensor.split([run.stop - run.start for run, _ in order], dim)
        found: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for (_, rank), part in zip(order, cut, strict=True):
            found[rank].append(part)
        return [runs or [tensor.narrow(dim, 0, 0)] for runs in found]

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """The whole sequence, a new tensor, from the parts of all processes; each may be longer than its part."""
        runs = [
            iter(part.split([*(run.stop - run.start for run in own), part.shape[dim] - length], dim))
            for part, own, length in zip(parts, self._runs, self.lengths, strict=True)
        ]
        ordered = [next(runs[rank]) for _, rank in self._in_order()]
        return torch.cat(ordered or [parts[0].narrow(dim, 0, 0)], dim)

    def _in_order(self) -> list[tuple[slice, int]]:
        """All runs in the order of the sequence, and the process of each."""
        found = [(run, rank) for rank, runs in enumerate(self._runs) for run in runs]
        return sorted(found, key=lambda each: each[0].start)

    def _cut(self, count: int, index: int) -> slice:
        least, more = divmod(self.length, count)
        start = index * least + min(index, more)
        return slice(start, start + least + (index < more))


def _joined(*runs: slice) -> tuple[slice, ...]:
    """Runs in ascending order, without empty ones; neighbours as one."""
    found: list[slice] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if found and found[-1].stop == run.start:
            found[-1] = slice(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)
