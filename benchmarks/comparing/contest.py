"""A contest: ways to do one piece of work, prepared, compared once, and timed in turn."""

from __future__ import annotations

import gc
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import final

import torch

from benchmarks.command import Effort, Line
from benchmarks.peers.work import Outputs, Unsupported, Way
from benchmarks.timing import samples

from .load import with_load
from .results import OURS, Result

__all__ = ["Case", "Contest", "TimedCase", "enter", "largest_difference", "lines_of", "scale_difference"]

#: Threads of OpenMP spin for up to 15 ms after a call; the next call should have all cores.
REST = 0.02


@final
@dataclass
class Contest:
    """Ways to do one piece of work. A way that returns no tensors is timed, not compared.

    Args:
        ways: one call each, by name; the first is what the others are compared with.
        amounts: work done by one call, in flops, bytes or items, where a rate makes sense.
        skipped: the ways that are not measured, and why.
        kernel: the kernel that Clearhead chooses.
        compared: the part of a call's outputs that is compared.
    """

    ways: dict[str, Way] = field(default_factory=dict)
    amounts: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    kernel: str = ""
    compared: Callable[[Outputs], Outputs] = lambda outputs: outputs


class Case(ABC):
    """One line of the table, measured on demand."""

    section: str
    name: str

    @abstractmethod
    def measure(self, effort: Effort) -> Result:
        """Measure now."""


def lines_of(cases: Iterable[Case], effort: Effort) -> list[Line]:
    """The cases as lines of a result file."""
    return [Line(f"{case.section}: {case.name}", lambda case=case: case.measure(effort).kept()) for case in cases]


def largest_difference(ours: Outputs, theirs: Outputs) -> float:
    """Largest distance of an entry, relative to the largest entry of its tensor."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a.double() - b.double()).abs().max() / a.double().abs().max()).item() for a, b in pairs)


def scale_difference(ours: Outputs, theirs: Outputs) -> float:
    """Relative distance of the root mean squares: for dropout, whose masks differ between implementations."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(b.double().square().mean().sqrt() / a.double().square().mean().sqrt() - 1).item() for a, b in pairs)


@final
@dataclass(frozen=True)
class TimedCase(Case):
    """Times of one contest.

    Args:
        section, name: which work.
        prepare: builds the contest, which may take long (FlexAttention is compiled); nothing of it is timed.
        rate_unit: such as ``"GFLOP/s"`` or ``"GB/s"``, where the contest holds amounts.
        tolerance: the largest difference from Clearhead's result that is allowed.
        difference: how the difference of two results is measured.
        repeats: calls per figure, for calls too short for the clock.
        rate_scale: how much work per second is one of `rate_unit`.
        budget: seconds after which no further round starts.
        sample: times the ways, as `benchmarks.timing.samples` does. The load of the processors matters to that alone.
        within: makes a context, such as `torch.no_grad`, in which everything is called.
    """

    section: str
    name: str
    prepare: Callable[[], Contest]
    rate_unit: str = ""
    tolerance: float = 1e-5
    difference: Callable[[Outputs, Outputs], float] = largest_difference
    repeats: int = 1
    rate_scale: float = 1e9
    budget: float = 40.0
    sample: Callable[..., dict[str, list[float]]] = samples
    within: Callable[[], AbstractContextManager[object]] = nullcontext

    def measure(self, effort: Effort) -> Result:
        with self.within():
            return self._measure(effort)

    def _measure(self, effort: Effort) -> Result:
        contest = self.prepare()
        rest = 0.0 if effort.smallest else REST
        differences = self._compare(contest)
        times, load = with_load(
            lambda: self.sample(contest.ways, rounds=effort.rounds, budget=self.budget, repeats=self.repeats, rest=rest)
        )
        medians = {name: statistics.median(values) for name, values in times.items()}
        quartiles = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in times.items()}
        rates = {name: amount / medians[name] for name, amount in contest.amounts.items() if name in medians}
        del contest.ways
        if not effort.smallest:
            gc.collect()  # engines and compiled functions hold their operands in cycles
        return Result(
            self.section,
            self.name,
            "ms",
            {name: seconds * 1e3 for name, seconds in medians.items()},
            {name: (low * 1e3, high * 1e3) for name, (low, _, high) in quartiles.items()},
            {name: rate / self.rate_scale for name, rate in rates.items()},
            self.rate_unit if rates else "",
            contest.kernel,
            differences,
            self.tolerance,
            contest.skipped,
            load if self.sample is samples else None,
        )

    def _compare(self, contest: Contest) -> dict[str, float]:
        """Call every way once; one that raises is skipped, with its error as the reason."""
        torch.manual_seed(0)
        differences: dict[str, float] = {}
        ours: Outputs = ()
        for name, way in list(contest.ways.items()):
            try:
                outputs = way()
            except Exception as error:
                if name == OURS:
                    raise
                del contest.ways[name]
                contest.skipped[name] = str(Unsupported.because_of(error))
                continue
            seen = contest.compared(tuple(tensor.detach() for tensor in outputs))
            if name == OURS:
                ours = tuple(tensor.clone() for tensor in seen)
            elif seen:
                differences[name] = self.difference(ours, seen)
        return differences


def enter(contest: Contest, name: str, build: Callable[[], Way], amount: float | None = None) -> None:
    """Add a way to the contest, or note why it is skipped: not installed, or not supported."""
    try:
        contest.ways[name] = build()
    except (Unsupported, ModuleNotFoundError) as reason:
        contest.skipped[name] = str(Unsupported.because_of(reason))
        return
    if amount is not None:
        contest.amounts[name] = amount
