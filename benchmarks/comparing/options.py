"""The command line that comparisons with peers share."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["comparison_options"]


def comparison_options(description: str, *, rounds: int, results: Path, writes: str) -> argparse.ArgumentParser:
    """A parser of --only, --rounds, --json, --show and --docs.

    Args:
        description: of the command.
        rounds: the default.
        results: where the figures of a whole table are kept.
        writes: what --docs does.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", metavar="PATTERN", default="", help="measure work whose name matches this regex")
    how_often = f"how often everything is timed (default {rounds}, at least 3)"
    parser.add_argument("--rounds", type=int, default=rounds, help=how_often)
    kept = f"keep the figures here; the whole table's: {results}"
    parser.add_argument("--json", type=Path, metavar="FILE", help=kept)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="measure nothing; show kept figures")
    parser.add_argument("--docs", action="store_true", help=writes)
    return parser
