"""Peak memory of training with dropout at two lengths: does it grow with L, or with its square?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from benchmarks.command import Effort
from benchmarks.comparing import OURS, Case, Result
from benchmarks.memory import growth_of_peak
from benchmarks.peers import SDPA
from benchmarks.peers.pytorch import sdpa
from benchmarks.peers.work import AttentionWork, draw

from .attention import kernel_of, ours

__all__ = ["memory_cases"]

LENGTHS = (2048, 4096)
WAYS = {OURS: ours, SDPA: sdpa}


def memory_cases(effort: Effort) -> Iterator[Case]:
    for length in LENGTHS:
        yield MemoryCase("forward + backward, dropout 0.1", f"peak memory, L={length}", effort.size(length))


@final
@dataclass(frozen=True)
class MemoryCase(Case):
    """Every figure comes from a process of its own, because a peak is a process's."""

    section: str
    name: str
    length: int

    def measure(self, effort: Effort) -> Result:
        figures = {way: effort.in_a_process(peak_growth, way, self.length) for way in WAYS}
        work = _work(self.length)
        return Result(self.section, self.name, "MB", figures, kernel=kernel_of(work, draw(work)))


def peak_growth(way: str, length: int) -> float:
    """Megabytes (10⁶ bytes) by which one training step raises the peak resident memory of this process."""
    torch.manual_seed(0)
    warm_up = _work(64)
    WAYS[way](warm_up, draw(warm_up))()  # libraries and thread pools are loaded once
    work = _work(length)
    step = WAYS[way](work, draw(work))
    return max(0.1, growth_of_peak(step)[0])  # less is a matter of single pages


def _work(length: int) -> AttentionWork:
    return AttentionWork(length, dropout_p=0.1, backward=True)
