"""What Clearhead keeps from one call for the next: the one place of the tests that knows its names."""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import lru_cache
from typing import Any

from clearhead._call.layout import Layout

from .requests import Grid

LAYOUT_FIELDS = Layout._fields
#: The environment tells only whether values are read.
GRID_FIELDS = [item.name for item in fields(Grid) if item.init and item.name != "environment"]


def forget() -> None:
    """Empty the cache of plans, and the other caches of functions."""
    for kept in _kept_by_arguments(tuple(name for name in sys.modules if name.startswith("clearhead."))):
        kept.cache_clear()


@lru_cache(1)
def _kept_by_arguments(names: tuple[str, ...]) -> list[Any]:
    """The functions of these modules that keep results."""
    return [item for name in names for item in vars(sys.modules[name]).values() if hasattr(item, "cache_clear")]
