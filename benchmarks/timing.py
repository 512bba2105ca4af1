"""Timing several ways to do one thing in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import track

__all__ = ["interleaved", "progress", "samples"]

T = TypeVar("T")

console = Console()


def interleaved(ways: Mapping[str, Callable[[], object]], *, rounds: int = 15, budget: float = 2.0) -> dict[str, float]:
    """Median seconds of each way over `rounds`, one call of each per round, after one warm-up round.

    Args:
        ways: what to time, by name.
        rounds: how many rounds at most; at least three are run.
        budget: seconds after which no further round starts.
    """
    return {name: statistics.median(values) for name, values in samples(ways, rounds=rounds, budget=budget).items()}


def samples(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    budget: float = 2.0,
    repeats: int = 1,
    rest: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of one call of each way, one figure per round, after one warm-up round.

    Args:
        ways: what to time, by name.
        rounds: how many rounds at most; at least three are run.
        budget: seconds after which no further round starts.
        repeats: calls per figure, for calls too short for the clock.
        rest: seconds of sleep before each way, until the threads of the previous call stop spinning.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    started = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - started > budget:
            break
        for name, way in ways.items():
            if rest:
                time.sleep(rest)
            start = time.perf_counter()
            for _ in range(repeats):
                way()
            times[name].append((time.perf_counter() - start) / repeats)
    return times


def progress(items: Iterable[T], description: str) -> Iterable[T]:
    """Show a progress bar on the terminal."""
    return track(list(items), description=description, console=console, transient=True)
