"""A run as a table for the terminal, and its summary as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from .results import Run
from .summary import Summary, describe, summarize

__all__ = ["markdown", "show"]

STATUSES = {
    "agrees": "computes with Clearhead; the results are those of eager attention",
    "keeps eager": "computes attention with its own code, whatever is set; the results do not change",
    "refused": "a route or a request raises an error; everything else agrees",
    "differs": "returns other results than eager attention",
    "not built": "no tiny random model, or no input for it",
}


def show(console: Console, run: Run) -> None:
    """Print what must not be, then the totals."""
    for outcome in run.outcomes:
        for found in outcome.wrong:
            console.print(f"{outcome.name}: {describe(found)}", highlight=False, soft_wrap=True)
    summary = summarize(run)
    console.print(f"{run.versions}; {_largest(summary)} {_gradients(summary)}", highlight=False, soft_wrap=True)
    for status, count, variants in _totals(summary):
        console.print(f"{count:4d} {status}{f' and {variants} as a decoder' if variants else ''}", highlight=False)


def markdown(summary: Summary) -> str:
    """The table of all model types."""
    parts = [_largest(summary), _totals_table(summary)]
    if summary["gradients"]["compared"]:
        parts.append(_gradients(summary))
        worse = summary["gradients"]["worse"]
        rows = (_bullet(name, f"{own:.1e}, SDPA {sdpa:.1e}") for name, (own, sdpa) in worse.items())
        parts += _section("Gradients further from float64 than 1.5 times SDPA's", rows)
    parts += _section("Refused", (_bullet(*entry) for entry in summary["refused"].items()))
    parts += _section("Different", (_bullet(*entry) for entry in summary["differs"].items()))
    known = (_bullet(name, f"outputs agree; weights differ by {value:.1e}") for name, value in summary["known"].items())
    said = "eager attention scales the weights of these layers back to a sum of 1."
    parts += _section("Weights of layers with sinks", known, said)
    parts += _section(
        "Above the limit, and SDPA or float64 as far from eager attention",
        (_bullet(*entry) for entry in summary["as far"].items()),
    )
    parts += ["## Keeps eager: attention code of its own, or no attention", _list(summary["keeps eager"])]
    reasons = "\n".join(f"* {_plain(reason)}: {_list(names)}" for reason, names in summary["not built"].items())
    parts += ["## Not built", f"<details><summary>reasons</summary>\n\n{reasons}\n\n</details>"]
    return "\n\n".join([*parts, "## Agrees", _list(summary["agrees"])])


def _totals(summary: Summary) -> Iterable[tuple[str, int, int]]:
    for status in STATUSES:
        if status in summary["counts"]:
            count, variants = summary["counts"][status]
            yield status, count, variants


def _totals_table(summary: Summary) -> str:
    rows = ["| | model types | also as a decoder | |", "|---|---:|---:|---|"]
    rows += [
        f"| {status} | {count} | {variants} | {STATUSES[status]} |" for status, count, variants in _totals(summary)
    ]
    return "\n".join(rows)


def _largest(summary: Summary) -> str:
    return (
        f"Largest difference within the limit of {summary['allowed']:.0e}, relative to the largest number of a tensor: "
        f"{summary['largest']:.1e}, in {summary['comparisons']} comparisons."
    )


def _gradients(summary: Summary) -> str:
    found = summary["gradients"]
    return (
        f"Gradients of {found['compared']} models are compared with float64: the median error is "
        f"{found['median ratio']:.2f} times SDPA's, and {len(found['worse'])} are above 1.5 times."
    )


def _section(title: str, lines: Iterable[str], about: str = "") -> list[str]:
    found = list(lines)
    return [f"## {title}", *([about] if about else []), "\n".join(found)] if found else []


def _bullet(name: str, text: str) -> str:
    return f"* `{name}`: {_plain(text)}"


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(text: str) -> str:
    """Texts of errors are not Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
