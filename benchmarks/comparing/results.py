"""What was measured, as plain data: kept in JSON, shown later without measuring again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

__all__ = ["Result", "Verdict", "read", "write"]


@final
@dataclass(frozen=True)
class Verdict:
    """One bar and what was measured against it.

    Args:
        bar: the bar in words.
        target: its number.
        at_least: whether the number must be reached; otherwise it must not be exceeded.
        value: what was measured; ``None`` if a way it needs was left out.
    """

    bar: str
    target: float
    at_least: bool
    value: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def reached(self) -> float | None:
        """The share of the bar that was reached: 1 or more where it is met."""
        if self.value is None:
            return None
        return self.value / self.target if self.at_least else self.target / self.value

    @property
    def text(self) -> str:
        if self.value is None:
            return "not measured"
        if self.met:
            return "met"
        by = 1 - self.value / self.target if self.at_least else self.value / self.target - 1
        return f"missed by {by:.0%}"


@final
@dataclass(frozen=True)
class Result:
    """One line of the table.

    Args:
        section, name: which work.
        unit: of `figures`: ``"ms"`` or ``"MB"``.
        figures: the median of every way.
        spreads: lower and upper quartile of every way.
        rates: what each way gets done per second, in `rate_unit`.
        kernel: what `clearhead.explain` says runs it.
        differences: each way's largest distance from Clearhead's result, relative to the largest entry.
        tolerance: how far it may be.
        left_out: who is missing, and why.
        verdicts: the bars.
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
    left_out: dict[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    load: float | None = None

    @property
    def wrong(self) -> dict[str, float]:
        """Ways whose result is not Clearhead's; a NaN is one of them."""
        return {name: value for name, value in self.differences.items() if not value <= self.tolerance}


def write(path: Path, machine: str, results: list[Result]) -> None:
    """Keep the results of one run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "results": [dataclasses.asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(paths: list[Path]) -> tuple[str, list[Result]]:
    """The machine and the results of one or several runs; of two results of the same work, the later file's counts.

    Raises:
        SystemExit: if the runs are from different machines, whose figures do not belong into one table.
    """
    results: dict[tuple[str, str], Result] = {}
    machines: dict[str, None] = {}
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        machines[content["machine"]] = None
        for entry in content["results"]:
            result = _result(entry)
            results[result.section, result.name] = result
    if len(machines) > 1:
        raise SystemExit(f"these runs are not of one machine: {'; '.join(machines)}")
    return next(iter(machines)), list(results.values())


def _result(entry: dict[str, Any]) -> Result:
    verdicts = tuple(Verdict(**verdict) for verdict in entry.pop("verdicts"))
    spreads = {name: (low, high) for name, (low, high) in entry.pop("spreads").items()}
    return Result(**entry, spreads=spreads, verdicts=verdicts)
