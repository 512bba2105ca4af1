"""What was measured, as plain data: kept in JSON, shown later without measuring again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

__all__ = ["OURS", "Result", "read", "write"]

OURS = "Clearhead"


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
    spreads = {name: (low, high) for name, (low, high) in entry.pop("spreads").items()}
    return Result(**entry, spreads=spreads)
