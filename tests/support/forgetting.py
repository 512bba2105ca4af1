"""What Clearhead keeps from one call for the next: the one place of the tests that knows its names."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import clearhead._layer.plan
from clearhead._call.call import valid_call
from clearhead._call.request import Request as Asked
from clearhead._call.spec import AttentionSpec

from .requests import Request

__all__ = ["SPEC_FIELDS", "forget", "spec_of"]

SPEC_FIELDS = AttentionSpec._fields


def forget() -> None:
    """Empty the cache of plans, and whatever functions keep by their arguments."""
    clearhead._layer.plan.plans.clear()
    for kept in _kept_by_arguments(tuple(name for name in sys.modules if name.startswith("clearhead."))):
        kept.cache_clear()


@lru_cache(1)
def _kept_by_arguments(names: tuple[str, ...]) -> list[Any]:
    """The functions of these modules that keep results."""
    return [each for name in names for each in vars(sys.modules[name]).values() if hasattr(each, "cache_clear")]


def spec_of(request: Request) -> AttentionSpec:
    """The spec of a request that nothing surrounds."""
    query, key, value = (request.leaves[name] for name in ("query", "key", "value"))
    asked = Asked(request.shown.mask, lse=request.lse, weights=request.weights, **request.options)
    return valid_call(query, key, value, asked).spec
