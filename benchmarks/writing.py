"""Figures as texts: numbers with their units, and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["megabytes", "milliseconds", "percent", "ratio", "seconds", "significant", "table"]


def significant(value: float) -> str:
    """Three digits that count, and never fewer than the whole part has."""
    for limit, digits in ((0.1, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    """Two decimals below 2, where they decide which way is faster; ten and more without any."""
    digits = 2 if value < 2 else 1 if value < 10 else 0
    return f"{value:.{digits}f}×"


def milliseconds(value: float) -> str:
    """From seconds."""
    return f"{significant(value * 1e3)} ms"


def seconds(value: float) -> str:
    return f"{value:.1f} s"


def megabytes(value: float) -> str:
    """From megabytes (10⁶ bytes): megabytes, or gigabytes from 10,000 on."""
    return f"{value / 1e3:.0f} GB" if value >= 10_000 else f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"


def percent(value: float) -> str:
    """From a share of 1."""
    return f"{value * 100:.1f} %"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned to the left, the others to the right."""
    rule = ["---" if at < left else "---:" for at in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))
