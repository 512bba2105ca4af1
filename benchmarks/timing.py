"""Timing several ways to do one thing in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from rich.console import Console
from rich.progress import track

__all__ = ["in_blocks", "interleaved", "progress", "samples"]

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


def in_blocks(
    ways: Mapping[str, Callable[[], T]],
    *,
    rounds: int,
    seconds: float,
    within: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
) -> tuple[dict[str, float], dict[str, T]]:
    """Median seconds of one call of each way over `rounds`, and the last result of each.

    A figure is a block of calls of one way behind a call that is not timed, so that the threads of the other way no
    longer spin. A round before the first sets how many calls a block has.

    Args:
        ways: what to time, by name.
        rounds: how many blocks each way has.
        seconds: how long a block of the first way takes at least.
        within: makes the context of a way's calls by its name; entering it is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, T] = {}
    repeats = 1
    for done in range(rounds + 1):
        for name, way in ways.items():
            with within(name):
                results[name] = way()
                start = time.perf_counter()
                for _ in range(repeats):
                    way()
                times[name].append((time.perf_counter() - start) / repeats)
        if not done:
            first = times[next(iter(ways))][0]
            repeats = max(1, int(seconds / max(first, 1e-7)))
            times = {name: [] for name in ways}
    return {name: statistics.median(values) for name, values in times.items()}, results


def progress(items: Iterable[T], description: str) -> Iterable[T]:
    """Show a progress bar on the terminal."""
    return track(list(items), description=description, console=console, transient=True)
