"""What Clearhead keeps from one call for the next: the one place of the tests that knows its names."""

from __future__ import annotations

import sys
from typing import Any

import clearhead._layer.plan
from clearhead._call.spec import AttentionSpec, validate_call

from .requests import Request

__all__ = ["SPEC_FIELDS", "forget", "spec_of"]

SPEC_FIELDS = AttentionSpec._fields


def forget() -> None:
    """Empty the cache of plans, and whatever functions keep by their arguments."""
    clearhead._layer.plan.plans.clear()
    for kept in _kept_by_arguments():
        kept.cache_clear()


def _kept_by_arguments() -> list[Any]:
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("clearhead.")]
    return [each for module in loaded for each in vars(module).values() if hasattr(each, "cache_clear")]


def spec_of(request: Request) -> AttentionSpec:
    """The spec of a request that nothing surrounds."""
    query, key, value = (request.leaves[name] for name in ("query", "key", "value"))
    return validate_call(
        query, key, value, request.shown.mask, return_lse=request.lse, weights=request.weights, **request.options
    ).spec
