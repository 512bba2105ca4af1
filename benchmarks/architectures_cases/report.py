"""Outcomes as a table for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from .results import LIMIT, Finding, Outcome
from .types import DECODER

__all__ = ["markdown", "show"]

STATUSES = {
    "agrees": "computes with Clearhead, as eager attention does",
    "keeps eager": "computes attention with code of its own, whatever is set, and gives the same with Clearhead set",
    "refused": "at least one route or request is refused with an error; all others agree",
    "differs": "gives something else than eager attention",
    "not built": "no tiny random model, or no input for it",
}


def show(console: Console, versions: str, outcomes: list[Outcome]) -> None:
    """Print what must not be, then the totals."""
    for outcome in outcomes:
        for found in outcome.wrong:
            console.print(f"{outcome.name}: {_described(found)}", highlight=False, soft_wrap=True)
    console.print(f"{versions}; {_largest(outcomes)}", highlight=False, soft_wrap=True)
    for status, count, variants in _totals(outcomes):
        console.print(f"{count:4d} {status}{f' and {variants} as a decoder' if variants else ''}", highlight=False)


def markdown(versions: str, outcomes: list[Outcome]) -> str:
    """Totals; what is refused, known to differ, kept by transformers and not built, with reasons; every difference."""
    parts = [f"With {versions}. {_largest(outcomes)}", _totals_table(outcomes)]
    parts += _section("Refused", (_bullet(o, _refusals(o)) for o in _having(outcomes, "refused")))
    parts += _section("Different", (_bullet(o, _described(f)) for o in outcomes for f in o.wrong[:1]))
    parts += _section(
        "Known: weights of layers with sinks",
        (_bullet(o, f"outputs agree; weights, {max(f.value for f in o.known):.1e}") for o in outcomes if o.known),
    )
    parts += _section(
        "As far from eager attention as SDPA or float64 is", (_bullet(o, _as_far(o)) for o in _far(outcomes))
    )
    kept = ", ".join(f"`{outcome.name}`" for outcome in _having(outcomes, "keeps eager"))
    parts += ["### Attention of their own", kept]
    parts += ["### Not built", _folded("reasons", "\n".join(_not_built(outcomes)))]
    return "\n\n".join([*parts, "### All that agree", _folded("largest differences", _agreeing(outcomes))]) + "\n"


def _totals(outcomes: list[Outcome]) -> Iterable[tuple[str, int, int]]:
    for status in STATUSES:
        found = _having(outcomes, status)
        variants = sum(outcome.name.endswith(DECODER) for outcome in found)
        if found:
            yield status, len(found) - variants, variants


def _totals_table(outcomes: list[Outcome]) -> str:
    rows = ["| | model types | also as a decoder | |", "|---|---:|---:|---|"]
    rows += [
        f"| {status} | {count} | {variants} | {STATUSES[status]} |" for status, count, variants in _totals(outcomes)
    ]
    return "\n".join(rows)


def _largest(outcomes: list[Outcome]) -> str:
    agreeing = [outcome.largest for outcome in outcomes if outcome.status in ("agrees", "refused")]
    compared = sum(outcome.compared for outcome in outcomes)
    return (
        f"Largest difference, relative to the largest number of a tensor: {max(agreeing, default=0.0):.1e} of the "
        f"{LIMIT:.0e} allowed; {compared} comparisons."
    )


def _having(outcomes: list[Outcome], status: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status == status]


def _far(outcomes: list[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.status != "differs" and any(found.explained for found in o.differences)]


def _as_far(outcome: Outcome) -> str:
    return _described(max(outcome.differences, key=lambda found: found.value))


def _described(found: Finding) -> str:
    others = [
        f"{name} {value:.1e}" for name, value in (("SDPA", found.sdpa), ("float64", found.double)) if value is not None
    ]
    value = f"{found.value:.1e} " if found.value else ""
    beside = f" ({', '.join(others)})" if others else ""
    return f"{found.route}, {found.observation}: {value}{found.text}{beside}"


def _refusals(outcome: Outcome) -> str:
    requests: dict[str, list[str]] = {}
    for found in outcome.errors:
        requests.setdefault(found.text, []).append(found.observation)
    texts = [f"`{route}`: {text}" for route, text in outcome.refused.items()]
    texts += [f"{text} ({', '.join(dict.fromkeys(names))})" for text, names in requests.items()]
    return "; ".join(texts)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [f"### {title}", "\n".join(found)] if found else []


def _bullet(outcome: Outcome, text: str) -> str:
    return f"* `{outcome.name}`: {_plain(text)}"


def _not_built(outcomes: list[Outcome]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for outcome in _having(outcomes, "not built"):
        reasons.setdefault(outcome.not_built, []).append(f"`{outcome.name}`")
    return [f"* {_plain(reason)}: {', '.join(names)}" for reason, names in sorted(reasons.items())]


def _agreeing(outcomes: list[Outcome]) -> str:
    rows = ["| model type | class | inputs | comparisons | largest difference |", "|---|---|---|---:|---:|"]
    for outcome in outcomes:
        if outcome.status in ("agrees", "refused", "keeps eager"):
            inputs = ", ".join(outcome.inputs)
            rows.append(
                f"| {outcome.name} | {outcome.class_name} | {inputs} | {outcome.compared} | {outcome.largest:.1e} |"
            )
    return "\n".join(rows)


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _plain(text: str) -> str:
    """Texts of errors are not Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
