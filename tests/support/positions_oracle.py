"""Rotary embeddings, ALiBi and T5's buckets written a second time, in plain numbers and complex float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frequency(base: float, size: int, i: int) -> float:
    """Radians per position of pair i, unscaled."""
    return math.exp(-2 * i / size * math.log(base))


def turn(x: Tensor, positions: Tensor, frequencies: list[float], *, interleaved: bool = False) -> Tensor:
    """Turn x (B, H, L, D) at positions (B, L) as complex numbers; features beyond the pairs stay."""
    size = 2 * len(frequencies)
    turned, rest = x[..., :size].double(), x[..., size:].double()
    if interleaved:
        pairs = torch.complex(turned[..., 0::2], turned[..., 1::2])
    else:
        pairs = torch.complex(turned[..., : size // 2], turned[..., size // 2 :])
    angles = positions.clamp(min=0).double()[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    pairs = pairs * torch.exp(1j * angles)
    parts = torch.view_as_real(pairs).flatten(-2) if interleaved else torch.cat((pairs.real, pairs.imag), -1)
    return torch.cat((parts, rest), -1)


def alibi_slope(num_heads: int, head: int) -> float:
    """The paper's geometric sequence; beyond a power of two every other number of the sequence twice as long."""
    power = 1
    while power * 2 <= num_heads:
        power *= 2
    if head < power:
        return 2.0 ** (-8.0 * (head + 1) / power)
    doubled = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(2 * power)]
    return doubled[0::2][head - power]


def bucket(distance: int, num_buckets: int, max_distance: int, *, bidirectional: bool) -> int:
    """T5's bucket of key position − query position."""
    if bidirectional:
        half = num_buckets // 2
        return bucket(-abs(distance), half, max_distance, bidirectional=False) + (half if distance > 0 else 0)
    back = max(0, -distance)
    single = num_buckets // 2
    if back < single:
        return back
    share = math.log(back / single) / math.log(max_distance / single)
    # Rounding must not decide: the sizes used here never fall on an edge by a hair, except exactly.
    return min(num_buckets - 1, single + math.floor(share * (num_buckets - single) + 1e-9))
