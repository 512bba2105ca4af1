"""What the pages say about a run: small enough to review, and kept in the repository."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from typing import Any

from .results import AS_EXACT, DECODER, LIMIT, ON, Finding, Outcome, Run

__all__ = ["Summary", "as_far_of", "counts_of", "describe", "summarize"]

#: Why a type that was not built is one that keeps eager attention.
FROM_SOURCE = "not built; no class in its source calls the attention function of transformers"
#: Why a type keeps it of which `upgrade` said nothing.
OWN_CODE = "computes attention with code of its own, or has none"

Summary = dict[str, Any]


def summarize(run: Run) -> Summary:
    """Counts, largest difference, names by status, and reasons."""
    outcomes = run.outcomes
    having = {
        status: [o for o in outcomes if o.status == status] for status in dict.fromkeys(o.status for o in outcomes)
    }
    compared = [o for o in outcomes if o.gradient_errors]
    return {
        "comparisons": sum(o.compared for o in outcomes),
        "allowed": LIMIT,
        "largest": max((o.largest for o in outcomes if o.status in ("agrees", "refused")), default=0.0),
        "counts": {status: _counts(found) for status, found in having.items()},
        "gradients": _gradients(compared),
        "agrees": _names(having.get("agrees", [])),
        "by upgrade": _names([o for o in having.get("agrees", []) if o.by_upgrade]),
        "keeps eager": _by_reason(having.get("keeps eager", []), _why_eager),
        "parts left": {o.name: "; ".join(o.left.values()) for o in having.get("agrees", []) if o.left},
        "mechanisms": {o.name: on for o in outcomes if (on := _mechanisms(o, above=True))},
        "off": {o.name: off for o in outcomes if (off := _mechanisms(o, above=False))},
        "refused": {o.name: _refusals(o) for o in having.get("refused", [])},
        "differs": {o.name: describe(o.wrong[0]) for o in having.get("differs", [])},
        "known": {o.name: max(found.value for found in o.known) for o in outcomes if o.known},
        "as far": {o.name: describe(max(o.differences, key=_value)) for o in outcomes if _is_far(o)},
        "not built": _by_reason(having.get("not built", []), _why_not_built),
    }


def counts_of(summary: Summary) -> dict[str, str]:
    """How many model types there are of each status, and what else sentences name."""
    counts = summary["counts"]
    statuses = ("agrees", "keeps eager", "refused", "differs", "not built")
    totals = {status: counts.get(status, [0, 0])[0] for status in statuses}
    found = {f"{status.replace(' ', '-')}": str(count) for status, count in totals.items()}
    compared = sum(totals.values()) - totals["not built"]
    as_far = as_far_of(summary)[0]
    return {
        **found,
        "compared": str(compared),
        "all": str(compared + totals["not built"]),
        "largest": f"{summary['largest']:.1e}",
        "agrees-eager": str(totals["agrees"] - as_far),
        "as-far": str(as_far),
        "comparisons": str(summary["comparisons"]),
        "gradients": str(summary["gradients"]["compared"]),
        "gradients-median": f"{summary['gradients']['median ratio']:.2f}×",
        "gradients-worse": str(len(summary["gradients"]["worse"])),
    }


def as_far_of(summary: Summary) -> list[int]:
    """As `summary["counts"]`, those of the types that agree which differ from eager as much as SDPA does."""
    agrees = set(summary["agrees"])
    return _count([name for name in summary["as far"] if name in agrees])


def _names(outcomes: list[Outcome]) -> list[str]:
    return [outcome.name for outcome in outcomes]


def _counts(outcomes: list[Outcome]) -> list[int]:
    """Model types, and those of them that are also built as a decoder."""
    return _count(_names(outcomes))


def _count(names: list[str]) -> list[int]:
    variants = sum(name.endswith(DECODER) for name in names)
    return [len(names) - variants, variants]


def _gradients(compared: list[Outcome]) -> Summary:
    """Errors of gradients beside SDPA's: how many were compared, the median ratio, and the models that are worse."""
    pairs = {o.name: (o.gradient_errors["clearhead"], o.gradient_errors["sdpa"]) for o in compared}
    worse = {name: list(pair) for name, pair in pairs.items() if pair[0] > max(LIMIT, AS_EXACT * pair[1])}
    ratios = [own / sdpa for own, sdpa in pairs.values() if sdpa > 0]
    return {"compared": len(pairs), "median ratio": statistics.median(ratios) if ratios else 0.0, "worse": worse}


def _by_reason(outcomes: list[Outcome], reason: Callable[[Outcome], str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: (reason(outcome), outcome.name)):
        reasons.setdefault(reason(outcome), []).append(outcome.name)
    return reasons


def _why_not_built(outcome: Outcome) -> str:
    return outcome.not_built


def _why_eager(outcome: Outcome) -> str:
    """What `upgrade` says of the model, or what was read from its source."""
    if outcome.without_interface:
        return FROM_SOURCE
    return re.sub(r"^[A-Z]\w+ (?=computes)", "", outcome.left.get("", OWN_CODE))


def _mechanisms(outcome: Outcome, *, above: bool) -> dict[str, float | str]:
    """The mechanisms that are on, or not, with the effect of each or the reason why it cannot be ignored."""
    return {
        name: float(f"{effect:.2g}") if isinstance(effect, float) and math.isfinite(effect) else str(effect)
        for name, effect in outcome.mechanisms.items()
        if (isinstance(effect, float) and effect > ON) == above
    }


def _value(found: Finding) -> float:
    return found.value


def _is_far(outcome: Outcome) -> bool:
    return outcome.status != "differs" and any(found.explained for found in outcome.differences)


def describe(found: Finding) -> str:
    """One thing that is not as with eager attention, in one line."""
    others = [
        f"{name} {value:.1e}" for name, value in (("SDPA", found.sdpa), ("float64", found.double)) if value is not None
    ]
    if found.redrawn is not None:
        others.append(f"error for other parameters {found.redrawn:.2f} of theirs")
    value = f"{found.value:.1e} " if found.value else ""
    beside = f" ({', '.join(others)})" if others else ""
    return f"{found.route}, {found.observation}: {value}{found.text}{beside}"


def _refusals(outcome: Outcome) -> str:
    """The errors of routes and of requests."""
    texts = [f"`{route}`: {text}" for route, text in outcome.refused.items()]
    return "; ".join([*texts, *dict.fromkeys(found.text for found in outcome.errors)])
