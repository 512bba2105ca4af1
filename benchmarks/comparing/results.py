"""One line of a comparison, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, final

__all__ = ["OURS", "Result", "read_results", "wrong_results"]

OURS = "Clearhead"
ABOUT = ("section", "name")


@final
@dataclass(frozen=True)
class Result:
    """One line of the table.

    Args:
        section, name: which work.
        unit: of `figures`: ``"ms"`` or ``"MB"``.
        figures: the median of every way.
        spreads: lower and upper quartile of every way.
        rates: work per second of each way, in `rate_unit`.
        kernel: the kernel that `clearhead.explain` names.
        differences: each way's largest distance from Clearhead's result, relative to the largest entry.
        tolerance: the largest difference allowed.
        skipped: the ways that were not measured, and why.
        load: the share of all processors' time that other programs took while it was timed; ``None`` if unknown.
    """

    section: str
    name: str
    unit: str
    figures: dict[str, float]
    spreads: dict[str, tuple[float, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    rate_unit: str = ""
    kernel: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    skipped: dict[str, str] = field(default_factory=dict)
    load: float | None = None

    @property
    def wrong(self) -> dict[str, float]:
        """Ways whose result is not Clearhead's; a NaN is one of them."""
        return {name: value for name, value in self.differences.items() if not value <= self.tolerance}

    @property
    def ceilings(self) -> list[str]:
        """Ways that have a rate but no result of their own: they measure what the machine can do."""
        return [name for name in self.rates if name != OURS and name not in self.differences]

    @property
    def share(self) -> float | None:
        """Clearhead's rate as a share of the highest ceiling's; ``None`` where no ceiling was measured."""
        ceilings = [self.rates[name] for name in self.ceilings]
        return self.rates[OURS] / max(ceilings) if ceilings else None

    @property
    def ratios(self) -> dict[str, float]:
        """The time (or memory) of every other way divided by Clearhead's: above 1, Clearhead needs less."""
        others = [name for name in self.figures if name != OURS and name not in self.ceilings]
        return {name: self.figures[name] / self.figures[OURS] for name in others}

    @property
    def work(self) -> str:
        """The name of the line in the result file."""
        return f"{self.section}: {self.name}"

    def kept(self) -> dict[str, Any]:
        """Plain data without what is empty; the line's name has the section and the name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value and name not in ABOUT}


def read_results(measured: dict[str, Any]) -> list[Result]:
    """The results among the lines of a result file."""
    return [_result(work, entry) for work, entry in measured.items()]


def wrong_results(measured: dict[str, Any]) -> list[str]:
    """Results that differ from Clearhead's by more than the tolerance."""
    return [
        f"DIFFERENT RESULT: {result.work}: {name} is {value:.1e} away, tolerance {result.tolerance:.0e}"
        for result in read_results(measured)
        for name, value in result.wrong.items()
    ]


def _result(work: str, entry: dict[str, Any]) -> Result:
    section, _, name = work.partition(": ")
    spreads = {way: (low, high) for way, (low, high) in entry.get("spreads", {}).items()}
    return Result(section, name, **{**entry, "spreads": spreads})
