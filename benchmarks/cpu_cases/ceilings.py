"""What the machine gives: the rate of matrix products, and of reading memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from benchmarks.comparing import Contest, enter
from benchmarks.peers.work import Outputs, Unsupported, Way

__all__ = ["GEMM", "READING", "add_gemm", "add_reading", "cache_bytes"]

GEMM = ("torch.mm", "oneDNN linear")
READING = ("reading: sum", "reading: dot")
#: Rows and columns of the products: 17 GFLOP, beyond which the rate does not rise.
SIZE = 2048


def add_gemm(contest: Contest, dtype: torch.dtype) -> None:
    """Let the two matrix products take part, with their flops, so that every round measures the ceiling too."""
    left, right = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)

    def mm() -> Outputs:
        torch.mm(left, right)
        return ()

    def build_linear() -> Way:
        if not torch.backends.mkldnn.is_available():
            raise Unsupported("this PyTorch is built without oneDNN")

        def linear() -> Outputs:
            torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
            return ()

        return linear

    enter(contest, GEMM[0], lambda: mm, 2.0 * SIZE**3)
    enter(contest, GEMM[1], build_linear, 2.0 * SIZE**3)


def add_reading(contest: Contest) -> None:
    """Let two ways of reading buffers larger than the last-level cache take part, with the bytes they read."""
    count = max(1 << 28, 2 * cache_bytes()) // 4
    buffer = torch.ones(count)
    halves = buffer.view(2, -1) if count % 2 == 0 else buffer[:-1].view(2, -1)

    def total() -> Outputs:
        buffer.sum()
        return ()

    def dot() -> Outputs:
        torch.dot(halves[0], halves[1])
        return ()

    enter(contest, READING[0], lambda: total, 4.0 * count)
    enter(contest, READING[1], lambda: dot, 4.0 * halves.numel())


def cache_bytes() -> int:
    """Size of the largest cache that Linux reports; 64 MiB where it reports none."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [file.read_text(encoding="ascii").strip() for file in folder.glob("index*/size")]
    return max((int(size.rstrip("K")) * 1024 for size in sizes if size.endswith("K")), default=1 << 26)


def in_turn(ways: list[Way]) -> Way:
    """Each call takes the next, so that a call does not find its operands in the cache."""
    endless = itertools.cycle(ways)
    return lambda: next(endless)()
