"""Calls with what modules and `clearhead.distributed` ask for beyond `attention`, and their blocks, grids and masks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead._call.call import Results
from clearhead._call.request import Request
from clearhead._environment import read_environment
from clearhead._layer.plan import attend
from clearhead.masks._grid import ALL, Block, Grid, Offset
from clearhead.masks._part import document_ids, part_of
from clearhead.masks._prepared import shared

__all__ = ["ALL", "Block", "Grid", "Offset", "Request", "document_ids", "part_of", "requested", "shared"]


def requested(query: Tensor, key: Tensor, value: Tensor, **request: Any) -> Results:
    """The results of a call with the fields of a request."""
    return attend(query, key, value, Request(**request), read_environment())
