"""Contests: ways to do the same work, compared with each other and timed in turn."""

from .contest import Case, Contest, TimedCase, enter, scale_difference
from .results import OURS, Result, read, write

__all__ = [
    "OURS",
    "Case",
    "Contest",
    "Result",
    "TimedCase",
    "enter",
    "read",
    "scale_difference",
    "write",
]
