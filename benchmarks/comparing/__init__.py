"""Contests: ways to do the same work, compared with each other and timed in turn."""

from .contest import Case, Contest, TimedCase, enter, lines_of, scale_difference
from .results import OURS, Result, read_results, wrong_results
from .tables import markdown

__all__ = [
    "OURS",
    "Case",
    "Contest",
    "Result",
    "TimedCase",
    "enter",
    "lines_of",
    "markdown",
    "read_results",
    "scale_difference",
    "wrong_results",
]
