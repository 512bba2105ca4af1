"""Outcomes as a table for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from .results import Outcome

__all__ = ["markdown", "show"]


def show(console: Console, versions: str, outcomes: list[Outcome]) -> None:
    """Print what differs, then the totals."""
    for outcome in outcomes:
        for found in outcome.wrong:
            console.print(
                f"{outcome.name}, {found.route}, {found.observation}: {found.value:.1e} {found.text}"
                f" (sdpa {found.sdpa}, float64 {found.double})",
                highlight=False,
                soft_wrap=True,
            )
    console.print(f"{versions}: {dict(Counter(outcome.status for outcome in outcomes))}", highlight=False)


def markdown(versions: str, outcomes: list[Outcome]) -> str:
    return versions
