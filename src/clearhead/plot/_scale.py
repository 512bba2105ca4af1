"""Where a picture's colour scale ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ENDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BELOW = 0.995
MOST_SAMPLES = 1_000_000


def scale_end(parts: Sequence[Tensor], ends: Sequence[float] = ENDS) -> float:
    """The first of `ends` that 995 of 1000 of a picture's weights do not exceed, or the last one.

    Weights get smaller as texts get longer; a scale that always ended at 1 would leave long texts white.

    Example:
        >>> scale_end([torch.eye(4)]), scale_end([torch.full((300, 300), 1 / 300)])
        (1.0, 0.005)
    """
    values = torch.cat([part.detach().flatten().float() for part in parts])
    values = values[:: max(1, values.numel() // MOST_SAMPLES)]
    if not values.numel():
        return ends[-1]
    largest = values.kthvalue(max(1, round(values.numel() * BELOW))).values.item()
    return next((end for end in ends if end >= largest), ends[-1])
