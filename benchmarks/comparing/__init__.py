"""Contests: ways to do the same work, timed in turn, compared with each other and held against bars."""

from .bars import OURS, Bar, Growth, Slower, Speedup, UtilisedShare
from .contest import Case, Contest, TimedCase, enter, scale_difference
from .results import Result, Verdict, read, write

__all__ = [
    "OURS",
    "Bar",
    "Case",
    "Contest",
    "Growth",
    "Result",
    "Slower",
    "Speedup",
    "TimedCase",
    "UtilisedShare",
    "Verdict",
    "enter",
    "read",
    "scale_difference",
    "write",
]
