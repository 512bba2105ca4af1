"""A run in lines for the terminal. The page of models has a row for each type (docs/site/models.py)."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from .results import Run
from .summary import Summary, as_far_of, describe, summarize

__all__ = ["show"]

#: The results, from the best to the least.
STATUSES = ("agrees", "agrees with SDPA", "keeps eager", "refused", "differs", "not built")


def show(console: Console, run: Run) -> None:
    """Print what must not be, then the totals."""
    for outcome in run.outcomes:
        for found in outcome.wrong:
            console.print(f"{outcome.name}: {describe(found)}", highlight=False, soft_wrap=True)
    summary = summarize(run)
    console.print(f"{run.versions}; {_largest(summary)} {_gradients(summary)}", highlight=False, soft_wrap=True)
    for status, count, variants in _totals(summary):
        console.print(f"{count:4d} {status}{f' and {variants} as a decoder' if variants else ''}", highlight=False)


def _totals(summary: Summary) -> Iterable[tuple[str, int, int]]:
    far = as_far_of(summary)
    counts = summary["counts"] | ({"agrees with SDPA": far} if any(far) else {})
    for status in STATUSES:
        if status in counts:
            count, variants = counts[status]
            if status == "agrees":
                count, variants = count - far[0], variants - far[1]
            yield status, count, variants


def _largest(summary: Summary) -> str:
    return (
        f"Largest difference within the limit of {summary['allowed']:.0e}, relative to the largest number of a tensor: "
        f"{summary['largest']:.1e}, in {summary['comparisons']} comparisons."
    )


def _gradients(summary: Summary) -> str:
    found = summary["gradients"]
    return (
        f"For each of {found['compared']} models, the error of the gradients against float64 is divided by that of "
        f"SDPA. The median of these ratios is {found['median ratio']:.2f}. Models whose error is above "
        f"{summary['allowed']:.0e} and more than 1.5 times that of SDPA: {len(found['worse']) or 'none'}."
    )
