"""Times of calls on a GPU: events around each call, its cache flushed before, Python ahead of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.timing import samples

__all__ = ["device_samples", "host_seconds"]

#: More than the second-level cache of any GPU.
FLUSHED_BYTES = 256 << 20
#: The device waits so many cycles before the first event, about a millisecond, in which Python prepares the call.
HEAD_START = 2_000_000


def device_samples(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    budget: float = 4.0,
    repeats: int = 1,
    rest: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of one call of each way on the device, one figure per round, after two warm-up calls.

    The ways are timed in turn. Without a GPU these are the times of the CPU.

    Args:
        ways: what to time, by name.
        rounds: how many rounds at most; at least three are run.
        budget: seconds after which no further round starts.
        repeats, rest: only without a GPU, as for `samples`.
    """
    if not torch.cuda.is_available():
        return samples(ways, rounds=rounds, budget=budget, repeats=repeats, rest=rest)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2):
        for way in ways.values():
            way()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - began > budget:
            break
        events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        for name, way in ways.items():
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flushed.zero_()
            getattr(torch.cuda, "_sleep")(HEAD_START)  # noqa: B009
            first.record()
            way()
            last.record()
            events[name] = first, last
        torch.cuda.synchronize()
        for name, (first, last) in events.items():
            times[name].append(first.elapsed_time(last) / 1e3)
    return times


def host_seconds(way: Callable[[], object], calls: int = 100) -> float:
    """Seconds that Python takes for one call, without waiting for the device: the least of five runs."""
    runs: list[float] = []
    for _ in range(6):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            way()
        runs.append((time.perf_counter() - start) / calls)
    return min(runs[1:])
