"""The dropout mask that all kernels but PyTorch's own draw: a pure function of seed and place.

Bits come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
The counter of a group of eight neighbouring keys is (key // 8, query, batch · H + head, 0), the key is the 64-bit
seed. Each of the eight 16-bit halves of the result decides about one key. A kernel can therefore draw any block in any
order, and a backward pass draws the same bits again.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..masks._grid import Block, Offset, ends_of

_WORD = 0xFFFFFFFF
_LEVELS = 1 << 16  # values of the 16 bits that decide about one weight
_LANES = 8  # keys that one counter decides about


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from PyTorch's generator, so that `torch.manual_seed` and checkpointing control dropout."""
    return torch.randint(0, 1 << 62, (), dtype=torch.int64, device=device)


def dropout_factors(seed: Tensor, p: float, block: Block, dtype: torch.dtype, offset: Offset | None = None) -> Tensor:
    """The factors of a block's weights, (b, h, l, s): 0 for dropped weights, 1/(1 − p) for the others.

    The probability is rounded to a multiple of 2⁻¹⁶. The factor uses the rounded probability, so the mean is exact. An
    `offset` places the block in a larger call, and the factors are those of the larger call.
    """
    threshold = round(p * _LEVELS)
    # Nothing is kept, and the factor 1/(1 − p) would be infinite.
    if threshold == _LEVELS:
        return torch.zeros_like(_bits(seed, block, offset), dtype=dtype)
    return (_bits(seed, block, offset) >= threshold).to(dtype).mul_(_LEVELS / (_LEVELS - threshold))


def _bits(seed: Tensor, block: Block, offset: Offset | None) -> Tensor:
    """16 random bits for every entry of the block, int64 (b, h, l, s)."""
    num_heads, head, row, column, item = offset or Offset(block.grid.num_heads)
    start, stop = (end + column for end in ends_of(cast(slice, block.columns), block.grid.key_length))
    first_group, last_group = start // _LANES, (stop + _LANES - 1) // _LANES
    groups = torch.arange(first_group, last_group, device=seed.device)  # (g,)
    streams = (block.b + item) * num_heads + (block.h + head)  # (b, h, 1, 1)
    words = philox4x32((groups, block.i + row, streams, torch.zeros_like(groups)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    shape = torch.broadcast_shapes(*(half.shape for half in halves))
    lanes = torch.stack([half.expand(shape) for half in halves], -1).flatten(-2)  # (b, h, l, 8·g)
    # A block may begin and end inside a group: the same key has the same bits in every block.
    return lanes[..., start - first_group * _LANES : stop - first_group * _LANES]


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on int64 tensors holding 32-bit words that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        low0, high0 = _multiply(c0, 0xD2511F53)
        low1, high1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Low and high words of a 32 × 32 bit product; int64 wraps, the bits are the same."""
    product = x * factor
    return product & _WORD, (product >> 32) & _WORD
