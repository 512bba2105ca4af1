"""What was found for each architecture, as plain data: kept in JSON, shown later without computing again."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

__all__ = [
    "AS_EXACT",
    "BY_UPGRADE",
    "DECODER",
    "LIMIT",
    "ON",
    "Finding",
    "Outcome",
    "Run",
    "first_line",
    "read",
    "write",
]

#: What the name of a model type ends with where an encoder is built as a decoder.
DECODER = " (decoder)"
#: The route of models that `set_attn_implementation` leaves eager: `clearhead.upgrade` swaps their attention classes.
BY_UPGRADE = "upgrade"
#: How far outputs may be from eager attention, relative to the largest; beyond, SDPA has to differ as much.
LIMIT = 2e-5
#: How much of the largest output ignoring a mechanism has to change, for the mechanism to be on.
ON = 1e-2
#: Two differences from eager attention that are rounding alone are of the same size, not the same.
AS_MUCH = 1.05
#: How far from float64 an observation may be, in errors of eager attention or SDPA; below `LIMIT` the ratio is chance.
AS_EXACT = 1.5


@final
@dataclass(frozen=True)
class Finding:
    """One thing that is not as with eager attention.

    Args:
        route, observation: where.
        value: how far from eager attention, relative to the largest.
        text: the tensor with the largest difference, the tensors missing, or the first line of the error.
        refused: whether it was refused with an error.
        sdpa, double: how far SDPA, and float64 with eager attention, are from eager attention.
        redrawn: for other random parameters, the median of the error against float64 divided by that of eager attention
            or SDPA, whichever is farther from it.
    """

    route: str
    observation: str
    value: float = 0.0
    text: str = ""
    refused: bool = False
    sdpa: float | None = None
    double: float | None = None
    redrawn: float | None = None

    @property
    def explained(self) -> bool:
        """Whether SDPA, or where there is none float64, differs from eager attention as much.

        Or whether for most other parameters it is as exact as they are: what is left is where rounding decides, such as
        the sign of a number that is almost zero.
        """
        other = self.sdpa or self.double or 0.0
        as_much = math.isfinite(other) and self.value <= AS_MUCH * other
        return as_much or (self.redrawn is not None and self.redrawn <= AS_EXACT)


@final
@dataclass
class Outcome:
    """What was found for one architecture.

    Args:
        name, class_name: which.
        not_built: why there is no model or no input for it.
        inputs: the arguments of its forward that were given.
        without_interface: whether there is no model, and no source of it calls transformers' attention function.
        mechanisms: by mechanism and field, how much of the output ignoring it changes, or why it cannot be ignored.
        refused: by route, why there is no model.
        left: what `upgrade` reports as left alone, by the name of the part, with the reason.
        kept_eager: routes after which no part of the model has the implementation.
        calls: by route, how often the model called the implementation.
        compared: observations that were compared.
        skipped: observations that eager attention does not have, and why.
        largest: difference of the observations within `LIMIT`.
        differences: observations beyond.
        missing: observations without tensors that eager attention returns.
        known: weights that differ by what they mean, not by a mistake: a sink is in their denominator.
        violations: of causality.
        errors: observations that raised an error.
        gradient_errors: how far gradients of Clearhead and of SDPA are from float64, relative to the largest.
        seconds: taken.
    """

    name: str
    class_name: str
    not_built: str = ""
    inputs: list[str] = field(default_factory=list)
    without_interface: bool = False
    mechanisms: dict[str, float | str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    kept_eager: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    largest: float = 0.0
    differences: list[Finding] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    known: list[Finding] = field(default_factory=list)
    violations: list[Finding] = field(default_factory=list)
    errors: list[Finding] = field(default_factory=list)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def unexplained(self) -> list[Finding]:
        """Differences that SDPA, or float64, does not have.

        SDPA returns no weights: where its outputs of a call differ as much as Clearhead's, the weights do so with them.
        """
        shared = {(found.route, found.observation) for found in self.differences if found.sdpa and found.explained}
        return [
            found
            for found in self.differences
            if not found.explained
            and not (found.sdpa is None and "attentions" in found.text and (found.route, found.observation) in shared)
        ]

    @property
    def wrong(self) -> list[Finding]:
        """All that must not be: differences, ignored weights, later tokens that are seen, unclear errors.

        After `upgrade` no call may raise, not even with a clear error.
        """
        raised = [found for found in self.errors if not found.refused or found.route == BY_UPGRADE]
        return [*self.unexplained, *self.missing, *self.violations, *raised]

    @property
    def by_upgrade(self) -> bool:
        """Whether the model computes with Clearhead after `clearhead.upgrade` only."""
        return bool(self.calls.get(BY_UPGRADE)) and self.calls[BY_UPGRADE] == sum(self.calls.values())

    @property
    def status(self) -> str:
        if self.not_built:
            return "keeps eager" if self.without_interface else "not built"
        if self.wrong:
            return "differs"
        if self.refused or self.errors:
            return "refused"
        if not any(self.calls.values()):
            return "keeps eager"
        return "agrees"


def first_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@final
@dataclass(frozen=True)
class Run:
    """All outcomes, with the versions of the libraries, the date and the machine."""

    versions: str
    outcomes: list[Outcome]
    date: str = ""
    machine: str = ""


def write(path: Path, run: Run) -> None:
    """Keep a run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(run), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> Run:
    """A run that `write` kept."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Run(**{**content, "outcomes": [_outcome(entry) for entry in content["outcomes"]]})


def _outcome(entry: dict[str, object]) -> Outcome:
    for name in ("differences", "missing", "known", "violations", "errors"):
        entry[name] = [Finding(**found) for found in entry[name]]  # type: ignore[attr-defined]
    return Outcome(**entry)  # type: ignore[arg-type]
