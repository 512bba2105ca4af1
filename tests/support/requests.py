"""Calls with what modules and `clearhead.distributed` ask for beyond `attention`, and their blocks, grids and masks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead._call.call import Call, Results
from clearhead._environment import read_environment
from clearhead._layer.plan import attend
from clearhead.masks._bound import BoundMask, bind
from clearhead.masks._grid import ALL, Block, Grid, Offset
from clearhead.masks._part import part_of
from clearhead.masks._prepared import shared

__all__ = [
    "ALL",
    "Block",
    "BoundMask",
    "Call",
    "Grid",
    "Offset",
    "bind",
    "part_of",
    "requested",
    "shared",
]


def requested(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Results:
    """The results of a call with these options."""
    return attend(Call(query, key, value, **options), read_environment())
