"""A column of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..subject import Numbers, Subject, numbers


@dataclass(frozen=True)
class Tool:
    """Somebody else's tool.

    Args:
        name: of the column.
        found: makes the call with the tool.
        expected: makes it without, in float64. Default: outputs and gradients of the plain call.
        needs: what an entry must have, see `NEEDS`.
        tolerance: of a tool that rounds by itself. Default: that of the entry.
        slow: whether the tool takes seconds for a call.
    """

    name: str
    found: Callable[[Subject], Numbers]
    expected: Callable[[Subject], Numbers] = numbers
    needs: frozenset[str] = frozenset()
    tolerance: float | None = None
    slow: bool = False
