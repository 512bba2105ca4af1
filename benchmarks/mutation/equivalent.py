"""Mutants that mean the same as the source, judged one by one."""

from __future__ import annotations

#: By file and line, and the change: the reason.
EQUIVALENT: dict[tuple[str, str], str] = {}
