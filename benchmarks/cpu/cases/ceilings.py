"""Ceilings: the rate of matrix products, and of reading memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.comparing import Contest, enter
from benchmarks.peers.work import Outputs, Unsupported, Way

__all__ = ["GEMM", "READERS", "add_gemm", "cache_bytes", "in_turn"]

GEMM = ("torch.mm", "oneDNN linear")


def add_gemm(contest: Contest, dtype: torch.dtype, size: int) -> None:
    """Add two products of square matrices with their flops, so that every round measures the ceiling too.

    The rate does not rise beyond a `size` of 2048.
    """
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)

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

    enter(contest, GEMM[0], lambda: mm, 2.0 * size**3)
    enter(contest, GEMM[1], build_linear, 2.0 * size**3)


def _summing(left: Tensor, right: Tensor) -> Way:
    def total() -> Outputs:
        left.sum()
        right.sum()
        return ()

    return total


def _dotting(left: Tensor, right: Tensor) -> Way:
    def dot() -> Outputs:
        torch.dot(left.view(-1), right.view(-1))
        return ()

    return dot


#: Two ways of reading two contiguous tensors of one size. How fast that is depends on where their pages lie in memory
#: and on what the cache still holds: as a ceiling of some work they read its operands, in turn as the work does.
READERS = {"reading: sum": _summing, "reading: dot": _dotting}


def cache_bytes() -> int:
    """Size of the largest cache that Linux reports; 64 MiB where it reports none."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [file.read_text(encoding="ascii").strip() for file in folder.glob("index*/size")]
    return max((int(size.rstrip("K")) * 1024 for size in sizes if size.endswith("K")), default=1 << 26)


def in_turn(ways: list[Way], first: int = 0) -> Way:
    """Each call takes the next, so that a call does not find its operands in the cache.

    Args:
        ways: the same work on other operands.
        first: which one to begin with; peers that begin one after the other do not find each other's operands either.
    """
    endless = itertools.cycle(ways[first:] + ways[:first])
    return lambda: next(endless)()
