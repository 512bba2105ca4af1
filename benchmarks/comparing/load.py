"""How busy other programs keep the machine while something is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["with_load"]

T = TypeVar("T")
STAT = Path("/proc/stat")


def with_load(run: Callable[[], T]) -> tuple[T, float | None]:
    """What `run` returns, and the share of all processors' time that other programs took meanwhile (Linux only)."""
    before = _busy_seconds()
    own, wall = time.process_time(), time.perf_counter()
    result = run()
    after = _busy_seconds()
    own, wall = time.process_time() - own, time.perf_counter() - wall
    if before is None or after is None:
        return result, None
    return result, min(1.0, max(0.0, (after - before - own) / (wall * (os.cpu_count() or 1))))


def _busy_seconds() -> float | None:
    """Seconds that all processors together have spent on anything since the machine started."""
    try:
        with STAT.open(encoding="ascii") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    _user, _nice, _system, idle, waiting, *_others = ticks
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")
