"""Calls with what modules and `clearhead.distributed` ask for beyond `attention`, and the blocks and grids of calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead._call.call import Results
from clearhead._call.request import Request
from clearhead._environment import read_environment
from clearhead._layer.plan import attend
from clearhead.masks._grid import ALL, Block, Grid, Offset

__all__ = ["ALL", "Block", "Grid", "Offset", "Request", "requested"]


def requested(query: Tensor, key: Tensor, value: Tensor, **request: Any) -> Results:
    """The results of a call with the fields of a request."""
    return attend(query, key, value, Request(**request), read_environment())
