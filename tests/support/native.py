"""What tests of the native kernel share: the instruction sets of this machine, and the mark for machines without it."""

from __future__ import annotations

import pytest
from hypothesis import settings

from clearhead._native import instruction_sets

__all__ = ["SETS", "fewer_unless_best", "needs_native"]

SETS = instruction_sets()

needs_native = pytest.mark.skipif(not SETS, reason="the extension was not built here")


def fewer_unless_best(instructions: str) -> settings:
    """All instruction sets share their source, so the best one gets the whole budget and the others a third."""
    budget = settings.default.max_examples
    return settings(max_examples=budget if instructions == SETS[0] else budget // 3)
