"""Bars that figures are held against."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from .results import Verdict

__all__ = ["OURS", "Bar", "Growth", "Slower", "Speedup", "UtilisedShare"]

OURS = "Clearhead"


class Bar(ABC):
    """A number that the figures of one contest must reach, or must not exceed."""

    @abstractmethod
    def judge(self, figures: Mapping[str, float], rates: Mapping[str, float]) -> Verdict:
        """Hold the figures (seconds or bytes of each way) and rates (work per second) against the bar."""


@final
@dataclass(frozen=True)
class Speedup(Bar):
    """`way` is at least `factor` times as fast as the best of `than` that took part."""

    factor: float
    than: tuple[str, ...]
    way: str = OURS

    def judge(self, figures: Mapping[str, float], rates: Mapping[str, float]) -> Verdict:
        others = [figures[name] for name in self.than if name in figures]
        names = self.than[0] if len(self.than) == 1 else f"the better of {' and '.join(self.than)}"
        subject = "" if self.way == OURS else f"{self.way}: "
        value = min(others) / figures[self.way] if others and self.way in figures else None
        return Verdict(f"{subject}≥ {self.factor:g}× {names}", self.factor, True, value)


@final
@dataclass(frozen=True)
class Slower(Bar):
    """Clearhead takes at most `factor` times as long as `than`."""

    factor: float
    than: str

    def judge(self, figures: Mapping[str, float], rates: Mapping[str, float]) -> Verdict:
        value = figures[OURS] / figures[self.than] if self.than in figures else None
        return Verdict(f"time ≤ {self.factor:g}× {self.than}", self.factor, False, value)


@final
@dataclass(frozen=True)
class UtilisedShare(Bar):
    """Clearhead reaches this share of the highest rate among `ceilings`."""

    share: float
    ceilings: tuple[str, ...]
    named: str

    def judge(self, figures: Mapping[str, float], rates: Mapping[str, float]) -> Verdict:
        ceiling = max((rates[name] for name in self.ceilings if name in rates), default=None)
        value = None if ceiling is None else rates[OURS] / ceiling
        return Verdict(f"≥ {self.share:.0%} of {self.named}", self.share, True, value)


@final
@dataclass(frozen=True)
class Growth(Bar):
    """From `small` to `large` the figure grows by at most `factor`."""

    factor: float
    small: str
    large: str

    def judge(self, figures: Mapping[str, float], rates: Mapping[str, float]) -> Verdict:
        there = self.small in figures and self.large in figures
        value = figures[self.large] / figures[self.small] if there else None
        return Verdict(f"{self.large} ≤ {self.factor:g}× {self.small}", self.factor, False, value)
