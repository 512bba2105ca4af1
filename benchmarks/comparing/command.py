"""What the commands that compare with peers share: their options, and measuring or showing what was chosen."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from benchmarks.timing import console, progress

from .contest import Case
from .results import Result, read, write
from .tables import show, summary

__all__ = ["comparison_options", "fail_if_wrong", "measure_or_show"]


def comparison_options(description: str, *, rounds: int, results: Path, writes: str) -> argparse.ArgumentParser:
    """A parser of --list, --only, --rounds, --json, --show and --docs.

    Args:
        description: of the command.
        rounds: the default.
        results: where the figures of a whole table are kept.
        writes: what --docs does.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--list", action="store_true", help="name the work and stop")
    parser.add_argument("--only", metavar="PATTERN", default="", help="measure work whose name matches this regex")
    how_often = f"how often everything is timed (default {rounds}, at least 3)"
    parser.add_argument("--rounds", type=int, default=rounds, help=how_often)
    kept = f"keep the figures here; the whole table's: {results}"
    parser.add_argument("--json", type=Path, metavar="FILE", help=kept)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="measure nothing; show kept figures")
    parser.add_argument("--docs", action="store_true", help=writes)
    return parser


def measure_or_show(
    chosen: argparse.Namespace, cases: list[Case], machine: str, results: Path
) -> tuple[str, list[Result]]:
    """Measure the chosen cases in order, or read kept figures, and print the tables.

    Args:
        chosen: the parsed options.
        cases: the whole table.
        machine: what is measured on.
        results: where the figures of a whole table are kept; they are written after every case.

    Returns:
        The machine of the figures, and the figures.

    Raises:
        SystemExit: after ``--list``, or if ``--only`` matches nothing.
    """
    pattern = re.compile(chosen.only, re.IGNORECASE)
    cases = [case for case in cases if pattern.search(f"{case.section}, {case.name}")]
    if chosen.list:
        console.print("\n".join(f"{case.section}, {case.name}" for case in cases), highlight=False)
        raise SystemExit(0)
    if not cases:
        raise SystemExit(f"--only {chosen.only!r} matches nothing; --list names the work")
    found: list[Result] = []
    if chosen.show:
        machine, found = read(chosen.show)
        found = [result for result in found if pattern.search(f"{result.section}, {result.name}")]
    else:
        torch.manual_seed(0)
        keep = chosen.json or (None if chosen.only else results)
        for case in progress(cases, "measuring"):
            found.append(case.measure(chosen.rounds))
            console.print(summary(found[-1]), highlight=False)
            if keep is not None:
                write(keep, machine, found)
    show(console, machine, found)
    return machine, found


def fail_if_wrong(results: list[Result]) -> None:
    """Exit with an error if a result differs from Clearhead's by more than the tolerance."""
    if any(result.wrong for result in results):
        raise SystemExit("some results differ from Clearhead's by more than the tolerance; they are listed above")
