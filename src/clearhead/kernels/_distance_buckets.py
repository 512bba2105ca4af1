"""The buckets of distances between tokens, as disentangled attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 16  #: buckets and features of vectors are padded to multiples of it, as `TABLE_STEP` in C++
_BEYOND = 48  # distances that the kernel reads beyond the longest text, in lanes without a token


@dataclass(frozen=True)
class DistanceBuckets:
    """The buckets of distances i − j.

    Args:
        of_distance: int32 (2 · reach + 1,), rising, from distance −reach on.
        count: of the buckets.
    """

    of_distance: Tensor
    count: int

    @property
    def reach(self) -> int:
        """The largest distance."""
        return self.of_distance.shape[0] // 2

    @property
    def at_zero(self) -> int:
        """The address of the bucket of distance 0."""
        return self.of_distance.data_ptr() + self.reach * self.of_distance.element_size()

    def matrix(self, rows: int, keys: int) -> Tensor:
        """The bucket of each pair, int64 (rows, keys)."""
        distances = torch.arange(rows)[:, None] - torch.arange(keys)
        return self.of_distance[distances + self.reach].long()


def reach_of(longest: int) -> int:
    """The distances that `DistanceBuckets` needs for texts of at most so many tokens."""
    return -(-longest // STEP) * STEP + _BEYOND


def distance_buckets(of_distance: Tensor) -> DistanceBuckets:
    """Buckets (2 · reach + 1,) that rise from 0, for the kernel."""
    return DistanceBuckets(of_distance.to(torch.int32).contiguous(), int(of_distance[-1]) + 1)
