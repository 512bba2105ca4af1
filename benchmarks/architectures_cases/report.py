"""A run as a table for the terminal, and its summary as Markdown for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from .results import Run
from .summary import Summary, describe, figures, summarize

__all__ = ["filled", "markdown", "show", "write_pages"]

STATUSES = {
    "agrees": "computes with Clearhead; the results are those of eager attention",
    "keeps eager": "computes attention with its own code, whatever is set; the results do not change",
    "refused": "a route or a request raises an error; everything else agrees",
    "differs": "returns other results than eager attention",
    "not built": "no tiny random model, or no input for it",
}
PAGE = """# Table of model types

[Which models?](which-models.md) says what is compared. `python -m benchmarks.architectures --docs` writes this page.
"""


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
    """The page of the table."""
    where = ", ".join(filter(None, [summary["versions"], summary["date"], summary["machine"]]))
    parts = [PAGE + f"\nWith {where}. {_largest(summary)}", _totals_table(summary)]
    if summary["gradients"]["compared"]:
        parts.append(_gradients(summary))
        worse = summary["gradients"]["worse"]
        rows = (_bullet(name, f"{own:.1e}, SDPA {sdpa:.1e}") for name, (own, sdpa) in worse.items())
        parts += _section("Gradients further from float64 than 1.5 times SDPA's", rows)
    parts += _section("Refused", (_bullet(*entry) for entry in summary["refused"].items()))
    parts += _section("Different", (_bullet(*entry) for entry in summary["differs"].items()))
    known = (_bullet(name, f"outputs agree; weights differ by {value:.1e}") for name, value in summary["known"].items())
    parts += _section("Known: weights of layers with sinks", known)
    parts += _section(
        "As far from eager attention as SDPA or float64 is", (_bullet(*entry) for entry in summary["as far"].items())
    )
    parts += ["## Attention of their own", _list(summary["keeps eager"])]
    reasons = "\n".join(f"* {_plain(reason)}: {_list(names)}" for reason, names in summary["not built"].items())
    parts += ["## Not built", f"<details><summary>reasons</summary>\n\n{reasons}\n\n</details>"]
    return "\n\n".join([*parts, "## All that agree", _list(summary["agrees"])]) + "\n"


def filled(page: str, summary: Summary) -> str:
    """A page with its figures of architectures replaced.

    Raises:
        ValueError: if the page has a figure that the summary does not have.
    """
    found = figures(summary)

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in found:
            raise ValueError(f"the page has a figure {name}; known are {', '.join(found)}")
        return f"<!-- {name} -->{found[name]}<!-- /{name} -->"

    return re.sub(r"<!-- (architectures\.[\w-]+) -->.*?<!-- /\1 -->", replace, page, flags=re.DOTALL)


def write_pages(summary: Summary, table: Path, *pages: Path) -> None:
    """Write the table, and the figures in pages."""
    table.write_text(markdown(summary), encoding="utf-8")
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), summary), encoding="utf-8")


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
        f"Largest difference, relative to the largest number of a tensor: {summary['largest']:.1e} of the "
        f"{summary['allowed']:.0e} allowed; {summary['comparisons']} comparisons."
    )


def _gradients(summary: Summary) -> str:
    found = summary["gradients"]
    return (
        f"Gradients of {found['compared']} models are compared with float64: the median error is "
        f"{found['median ratio']:.2f} times SDPA's, and {len(found['worse'])} are above 1.5 times."
    )


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [f"## {title}", "\n".join(found)] if found else []


def _bullet(name: str, text: str) -> str:
    return f"* `{name}`: {_plain(text)}"


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(text: str) -> str:
    """Texts of errors are not Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
