"""Clearhead on a GPU beside PyTorch's other ways: attention with every mask, statistics, modules, packed sequences.

    python -m benchmarks.gpu [--only PATTERN] [--rounds 15] [--docs]
    python -m benchmarks.gpu --check

Times are those of the device: events stand around each call, its cache is flushed before, and Python is ahead of it.
The bars are what a version of Clearhead has to reach on an H100 or H200. ``--check`` compares values, gradients, waits
and backends instead. Without a GPU nothing is measured.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import OURS, Result, lines_of, markdown, read_results, wrong_results
from benchmarks.figures import Figures
from benchmarks.gpu import check
from benchmarks.gpu.cases import BACKENDS, FORWARD, HEAD_DIMS, HEADS, LENGTHS, Setting, all_cases, attention_name
from benchmarks.gpu.scored import BARS, FLEX, SCORED
from benchmarks.gpu.statistics import (
    ALL,
    ATTENTION,
    FOUR,
    PER_QUERY,
    PUBLIC_ALL,
    RECEIVED,
    WINDOW,
    long_record,
    small_calls_times,
    statistics_times,
)
from benchmarks.machine import versions
from benchmarks.writing import ratio, significant, table

__all__ = ["BENCHMARK", "bars", "lines_on"]

STATISTICS, LONG, SMALL = "statistics", "statistics, D=128, L=131,072", "small calls"
#: Lines that are no contests.
OTHERS = ("device", STATISTICS, SMALL)


def lines(effort: Effort) -> list[Line]:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False, so there is nothing to measure here")
    return list(lines_on("cuda", effort))


def lines_on(device: str, effort: Effort, heads: int = HEADS) -> Iterator[Line]:
    """The work; the tests run the smallest on a CPU."""
    yield Line("device", lambda: _device(device))
    lengths = tuple(effort.size(length, 32 + 8 * n) for n, length in enumerate(LENGTHS))
    for head_dim in HEAD_DIMS:
        for length, name in zip(lengths, LENGTHS, strict=True):
            setting = Setting(device, length, head_dim, heads=heads)
            eager = length == lengths[0]
            yield Line(
                f"{STATISTICS}, D={head_dim}, L={name:,}",
                lambda setting=setting, eager=eager: statistics_times(setting, effort.rounds, eager),
            )
    yield Line(LONG, lambda: long_record(device, effort.size(131072, 128), heads))
    yield Line(SMALL, lambda: small_calls_times(device))
    yield from lines_of(all_cases(device, lengths, HEAD_DIMS, heads, effort.peers), effort)


def _device(device: str) -> str:
    if device == "cpu":
        return "a CPU"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions(('triton', 'transformers'))}"


def bars(measured: Figures) -> list[tuple[str, str, float, float]]:
    """What is compared, where, the bar and the figure: what was measured of it. The first kind is a least figure."""
    found: list[tuple[str, str, float, float]] = []
    for result in _contests(measured):
        if result.section == FORWARD:
            backends = [result.figures[name] for name in ("SDPA", *BACKENDS) if name in result.figures]
            found.append((SPEED, result.name, 0.97, min(backends) / result.figures[OURS]))
        if result.section == SCORED and FLEX in result.figures:
            bar = BARS[result.name.split(",")[0]]
            found.append((f"{FLEX}'s time in ours ≥", result.name, bar, result.figures[FLEX] / result.figures[OURS]))
    for head_dim in HEAD_DIMS:
        for length in LENGTHS:
            where = f"D={head_dim}, L={length:,}"
            ms: dict[str, float] = measured.get(f"{STATISTICS}, {where}", {}).get("ms", {})
            limits = {RECEIVED: 0.9, PER_QUERY: 1.0 if head_dim == 128 else 1.3, ALL: 2.2, PUBLIC_ALL: 2.2}
            found += [
                (f"{name} ≤", where, limit, ms[name] / ms[ATTENTION]) for name, limit in limits.items() if name in ms
            ]
            if length == LENGTHS[1]:
                found += [(f"{WINDOW} ≤", where, 0.2, ms[WINDOW] / ms[FOUR])] if FOUR in ms and WINDOW in ms else []
                full, window = (_ours(measured, attention_name(head_dim, length, mask)) for mask in ("none", "window"))
                found += [("attention, window ≤", where, 0.2, window / full)] if full and window else []
    beyond = measured.get(LONG, {}).get("MB")
    return found if beyond is None else [*found, ("GB beyond query and key ≤", LONG, 3.0, beyond / 1e3)]


SPEED = "attention beside the fastest backend ≥"


def _ours(measured: Figures, name: str) -> float | None:
    return measured.get(f"{FORWARD}: {name}", {}).get("figures", {}).get(OURS)


def _contests(measured: Figures) -> list[Result]:
    return read_results({name: each for name, each in measured.items() if not name.startswith(OTHERS)})


def texts(measured: Figures) -> dict[str, str]:
    device = measured["device"]
    rows = [
        (what, where, significant(bar), significant(value), "yes" if _met(what, bar, value) else "no")
        for what, where, bar, value in bars(measured)
    ]
    calls: dict[str, float] = measured.get(SMALL, {})
    return {
        "device": device,
        "tables": markdown(_contests(measured)),
        "statistics": _statistics_table(measured),
        "small": table(("call", "µs"), [(name, significant(value)) for name, value in calls.items()]),
        "statistics-missing": _missing(measured) or "none",
        "modules": table(*_grid(measured, lambda section: section.startswith(("module", "packed")))),
        "cost": ratio(_cost(measured)),
        "attention": table(*_grid(measured, lambda section: section == FORWARD)),
        "bars": table(("what", "where", "bar", "measured", "met"), rows, left=2),
        "met": str(sum(row[4] == "yes" for row in rows)),
        "targets": str(len(rows)),
    }


def _met(what: str, bar: float, value: float) -> bool:
    return value >= bar if what == SPEED else value <= bar


def _grid(measured: Figures, wanted: Callable[[str], bool]) -> tuple[list[str], list[list[str]]]:
    """For readers: Clearhead's time, and how the others compare."""
    results = [result for result in _contests(measured) if wanted(result.section)]
    one_section = len({result.section for result in results}) == 1
    names = list(dict.fromkeys(name for result in results for name in result.ratios))
    rows = [
        [
            result.name if one_section else result.work,
            significant(result.figures[OURS]),
            *(ratio(result.ratios[name]) if name in result.ratios else "–" for name in names),
        ]
        for result in results
    ]
    return ["work", f"{OURS}, ms", *names], rows


def _cost(measured: Figures) -> float:
    """Statistics with top-8 beside the attention whose weights they describe, at the longest length that is timed."""
    ms: dict[str, float] = measured[f"{STATISTICS}, D={HEAD_DIMS[-1]}, L={LENGTHS[-1]:,}"]["ms"]
    return ms[PUBLIC_ALL] / ms[ATTENTION]


def _statistics_table(measured: Figures) -> str:
    kept: dict[str, dict[str, Any]] = {
        name: each for name, each in measured.items() if name.startswith(f"{STATISTICS}, ")
    }
    lengths = {name: each["ms"] for name, each in kept.items() if "ms" in each}
    ways = list(dict.fromkeys(way for each in lengths.values() for way in each))
    header = ("work, ms", *(name.removeprefix(f"{STATISTICS}, ") for name in lengths))
    rows = [(way, *(significant(ms[way]) if way in ms else "–" for ms in lengths.values())) for way in ways]
    long = kept.get(LONG, {})
    gb = f", {long['MB'] / 1e3:.1f} GB beyond query and key" if "MB" in long else ""
    said = f"{long['what']}, {long['seconds']:.2f} s{gb}" if "seconds" in long else "not measured"
    return f"{table(header, rows)}\n\nD=128, L=131,072: {said}."


def _missing(measured: Figures) -> str:
    """The ways that compute statistics and were not measured, each with its reason."""
    kept = [each for name, each in measured.items() if name.startswith(f"{STATISTICS}, ")]
    missing = {way: why for each in kept for way, why in each.get("skipped", {}).items()}
    return "; ".join(f"{way}: {reason}" for way, reason in missing.items())


def wrong(measured: Figures) -> list[str]:
    return wrong_results({name: each for name, each in measured.items() if not name.startswith(OTHERS)})


BENCHMARK = Benchmark("gpu", __doc__, lines, texts, minutes=4, rounds=15, wrong=wrong)

if __name__ == "__main__":
    if "--check" in sys.argv:
        check.main([each for each in sys.argv[1:] if each != "--check"])
    else:
        warnings.simplefilter("ignore")  # a backend that refuses a call says so with warnings too
        BENCHMARK.main()
