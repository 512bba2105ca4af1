"""Memory of a process: what it has, and its peak, which takes a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

__all__ = ["growth_of_peak", "in_a_process", "resident"]

T = TypeVar("T")


def growth_of_peak(run: Callable[[], T]) -> tuple[float, T]:
    """Megabytes (10⁶ bytes) by which a call raises the peak resident memory of this process, and what it returned."""
    before = _peak()
    result = run()
    return (_peak() - before) / 1e6, result


def in_a_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a module in a process that starts from nothing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def resident() -> float:
    """Megabytes (10⁶ bytes) that this process has in memory."""
    return _status("VmRSS") / 1e6


def _peak() -> int:
    """Most bytes that this process ever had in memory.

    Not `resource.getrusage`: what that reports starts at the parent's size, which may hide everything.
    """
    return _status("VmHWM")


def _status(field: str) -> int:
    """Bytes of a field of the system's report about this process."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024
