"""ALiBi: each head subtracts a multiple of the distance from the scores."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .._checks import integer
from ..masks._base import Mask
from ..masks._grid import Block, Grid, Sizes
from ..masks._structure import UNKNOWN, Structure
from ._checks import require_heads


@final
class ALiBi(Mask):
    """Attention with linear biases: scores decrease with the distance, at a different rate in each head.

    ::

        s_ij ← s_ij − m_h · |i − j|
        m_h = 2^(−8 (h + 1) / n)            h = 0 … n − 1,  n the largest power of two ≤ H
        m_h = 2^(−4 (2 (h − n) + 1) / n)    h = n … H − 1

    with i, j absolute positions (Press et al., "Train short, test long", 2022). It hides nothing; combine it with
    ``masks.causal()`` for a decoder. BLOOM adds + m_h · j instead, which a causal softmax turns into the same weights.

    Args:
        num_heads: H, query heads.

    Raises:
        ArgumentError: if `num_heads` is not positive.
        DTypeError: if it is not an int.
        ShapeError: at the call, if the query has another number of heads.

    Example:
        >>> from clearhead.positions import ALiBi
        >>> ALiBi(num_heads=8).dense(3)[0, 0]
        tensor([[-0.0000, -0.5000, -1.0000],
                [-0.5000, -0.0000, -0.5000],
                [-1.0000, -0.5000, -0.0000]])
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads: int = integer("num_heads", num_heads, least=1)

    @property
    def slopes(self) -> Tensor:
        """m, (H,), float32."""
        return slopes_of(torch.arange(self.num_heads), self.num_heads, torch.float32)

    def visible(self, block: Block) -> None:
        """None: it hides no key."""
        return None

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        """−slope · |i − j| for a block, with absolute positions: (1 or b, h, l, s)."""
        distances = (block.q - block.k).to(dtype).abs()  # (1 or b, 1 or h, l, s)
        return distances * -slopes_of(block.h, self.num_heads, dtype)

    def structure(self, grid: Grid) -> Structure:
        """The slopes, where positions count up."""
        if grid.shift is None:
            return UNKNOWN
        count, device = self.num_heads, grid.device
        return Structure(
            exact=False,
            slopes=lambda: slopes_of(torch.arange(count, device=device), count, torch.float32),
            per_head=True,
        )

    def validate(self, grid: Grid) -> None:
        """Raise unless the call has this number of heads."""
        require_heads("ALiBi", self.num_heads, grid)

    def sizes(self) -> Sizes:
        """The number of heads."""
        return Sizes(num_heads=self.num_heads)

    def describe(self) -> str:
        """The mask as its user writes it."""
        return f"ALiBi({self.num_heads})"


def slopes_of(heads: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The slopes m of these heads out of `num_heads`, in the shape of `heads`."""
    # Computed on the call's device, because a stored tensor would be copied there for every block.
    power = 1 << (num_heads.bit_length() - 1)
    first = (heads + 1).to(dtype) * (8 / power)
    further = (2 * (heads - power) + 1).to(dtype) * (4 / power)
    return torch.exp2(-torch.where(heads < power, first, further))
