"""Results as tables: for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from .bars import OURS
from .results import Result

__all__ = ["markdown", "show"]

#: Up to this share of the processors' time, other programs are taken for the system's own.
QUIET = 0.05

Grid = tuple[list[str], list[list[str]]]


def show(console: Console, machine: str, results: list[Result]) -> None:
    """Print times per section, then the bars, then what to know about them."""
    for section in sections(results):
        unit = section[0].unit
        _print(console, f"{section[0].section}, {unit} (ratio to {OURS})", times(section))
    _print(console, f"bars; {machine}", bars(results))
    for line in remarks(results):
        console.print(line, highlight=False, soft_wrap=True)


def markdown(machine: str, results: list[Result]) -> str:
    """The same tables as Markdown: bars first, then the times of every section."""
    parts = [f"Measured on: {machine}.", _markdown(bars(results))]
    for section in sections(results):
        parts += [f"### {section[0].section}", f"{_unit(section[0])}; in brackets the ratio to {OURS}."]
        parts.append(_markdown(times(section)))
    lines = [f"* {line}" for line in remarks(results)]
    return "\n\n".join([*parts, "### What to know about these figures", "\n".join(lines)]) + "\n"


def sections(results: list[Result]) -> list[list[Result]]:
    """Results of one section together, in order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result.section, result.unit), []).append(result)
    return list(found.values())


def times(section: list[Result]) -> Grid:
    """One line per result, one column per way."""
    names = list(dict.fromkeys(name for result in section for name in result.figures))
    names.sort(key=lambda name: name != OURS)
    header = ["work", "kernel", *names]
    rows = []
    for result in section:
        cells = [_figure(result, name) for name in names]
        rows.append([result.name, result.kernel or "–", *cells])
    if any(result.rates for result in section):
        header.append(f"{OURS}, {section[0].rate_unit}")
        for row, result in zip(rows, section, strict=True):
            row.append(f"{result.rates[OURS]:.0f}" if OURS in result.rates else "–")
    return header, rows


def bars(results: Iterable[Result]) -> Grid:
    """One line per bar: what was asked, what was measured, and by how much it was missed."""
    rows = []
    for result in results:
        for verdict in result.verdicts:
            value = "–" if verdict.value is None else f"{verdict.value:.2f}"
            rows.append([result.section, result.name, result.kernel or "–", verdict.bar, value, verdict.text])
    return ["work", "", "kernel", "bar", "measured", ""], rows


def remarks(results: Iterable[Result]) -> list[str]:
    """What to know about the figures: results that differ, work measured under load, and who is missing, and why."""
    results = list(results)
    lines = []
    for result in results:
        for name, value in result.wrong.items():
            lines.append(
                f"DIFFERENT RESULT: {result.section}, {result.name}: {name} is {value:.1e} away, "
                f"tolerance {result.tolerance:.0e}"
            )
    for tolerance in sorted({result.tolerance for result in results if result.differences}):
        close = [value for result in results if result.tolerance == tolerance for value in result.differences.values()]
        lines.append(f"Largest difference where {tolerance:.0e} is allowed: {max(close):.1e}")
    for result in results:
        if result.load is not None and result.load > QUIET:
            lines.append(
                f"NOT QUIET: other programs took {result.load:.0%} of the processors: {result.section}, {result.name}"
            )
    missing: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, reason in result.left_out.items():
            missing.setdefault((name, reason), []).append(f"{result.section}, {result.name}")
    for (name, reason), works in missing.items():
        lines.append(f"{name} left out ({reason}): {'; '.join(works)}")
    return lines


def _figure(result: Result, name: str) -> str:
    if name not in result.figures:
        return "–"
    value = result.figures[name]
    digits = 3 if value < 1 else 2 if value < 100 else 0
    text = f"{value:.{digits}f}"
    is_work = name in result.differences or (result.unit == "MB" and name != OURS)
    return f"{text} ({value / result.figures[OURS]:.2f}×)" if is_work and OURS in result.figures else text


def _unit(result: Result) -> str:
    return "Median milliseconds" if result.unit == "ms" else "Megabytes"


def _print(console: Console, title: str, grid: Grid) -> None:
    header, rows = grid
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _markdown(grid: Grid) -> str:
    header, rows = grid
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
