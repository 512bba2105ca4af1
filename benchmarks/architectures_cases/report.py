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
    "differs": "a result differs from that of eager attention by more than the limit",
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
    """Totals, and a row for each model type."""
    parts = [_largest(summary), _totals_table(summary)]
    if summary["gradients"]["compared"]:
        parts.append(_gradients(summary))
    rows = [
        f"| `{name}` | {status} | {_plain(remark)} |" for name, status, remark in sorted(_types(summary), key=_name)
    ]
    return "\n\n".join([*parts, "\n".join(["| model type | result | remark |", "|---|---|---|", *rows])])


def _types(summary: Summary) -> Iterable[tuple[str, str, str]]:
    """Name, result and remark of each model type."""
    remarks = {name: f"above the limit, but so is SDPA or float64: {text}" for name, text in summary["as far"].items()}
    for name, value in summary["known"].items():
        remarks[name] = f"outputs agree; weights differ by {value:.1e}, because eager scales them to a sum of 1"
    for name, (own, sdpa) in summary["gradients"]["worse"].items():
        remarks[name] = f"error of gradients {own:.1e}, SDPA {sdpa:.1e}"
    for status in ("agrees", "keeps eager"):
        yield from ((name, status, remarks.get(name, "")) for name in summary[status])
    for status in ("refused", "differs"):
        yield from ((name, status, reason) for name, reason in summary[status].items())
    for reason, names in summary["not built"].items():
        yield from ((name, "not built", reason) for name in names)


def _name(row: tuple[str, str, str]) -> str:
    return row[0].casefold()


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


def _plain(text: str) -> str:
    """Texts of errors are not Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
