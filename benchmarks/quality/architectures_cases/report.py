"""A run as a table for the terminal, and its summary as Markdown for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console

from .results import Run
from .summary import Summary, as_far_of, describe, summarize

__all__ = ["markdown", "show"]

#: What each result means, on the page of all model types.
STATUSES = {
    "agrees": "The model computes with Clearhead. The outputs are those of `eager`. Weights that differ have a remark.",
    "agrees with SDPA": "The model computes with Clearhead. Some result differs from that of `eager`, and PyTorch's "
    "SDPA differs as much.",
    "keeps eager": "The model has attention code of its own, or no attention. Your choice changes nothing. The remark "
    "is what the report of `upgrade` says, or what was read from the source of a type that was not built.",
    "refused": "Loading with Clearhead, or a call, raises the error in the remark.",
    "differs": "A result differs from that of `eager` by more than the limit. The remark says which one.",
    "not built": "The test could not build a tiny random model or its input. The remark is the test's own error, "
    "not one of Clearhead. Nothing is known about the type: "
    "[check your own model](which-models.md#check-your-own-model).",
}
#: What the remarks of the table mean.
REMARKS = """## Remarks

An empty remark means that there is nothing to add. *by `clearhead.upgrade(model)` only* means that the attention has
code of its own: `upgrade` swaps its classes, and `set_attn_implementation` changes nothing. *from a table of classes*
means that transformers looks the class of a part's attention up by name: that part keeps its own attention. The result
*refused* has an ArgumentError: the model's calls pass an argument that Clearhead does not support, which the remark
names. `upgrade` leaves such a model as it is. [What to do](which-models.md#refusals).

The reasons for *agrees with SDPA* are in [Which models?](which-models.md#types-that-agree-with-sdpa-only)."""
#: What the numbers in remarks mean, after an example of them.
NUMBERS = """In every remark with numbers:

* All differences are from `eager` in float32, and relative to the largest number of the tensor. Only the largest
  difference is named.
* *float64* is `eager` again, computed in float64. Its difference is the rounding error of `eager` in float32.
* `inf` means that there was no number to compare, because a result was NaN.
* *tokens 8 to 11* in place of the name of a tensor means the outputs of these tokens, in a call with a cache."""
#: The remark of models that `set_attn_implementation` leaves eager.
BY_UPGRADE_ONLY = "by `clearhead.upgrade(model)` only"
#: What `_refuse_unknown` of clearhead/integrations/transformers.py raises.
UNSUPPORTED = re.compile(r"ArgumentError: (\w+): expected no keyword that Clearhead's attention .*", re.DOTALL)
#: What `describe` says of a difference.
DIFFERENCE = re.compile(r"(?P<route>[^,]+), (?P<what>.+): (?P<value>\S+) (?P<tensor>.+) \((?P<others>.+)\)")
#: What the parts of its end mean.
OTHERS = {"SDPA": "PyTorch's SDPA", "float64": "`eager` computed in float64"}
#: Characters of an error on the page.
LONGEST = 100


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
    parts = [_totals_table(summary), *_named(summary), REMARKS, *_example(summary), NUMBERS]
    parts += ["## All types", _largest(summary)]
    if summary["gradients"]["compared"]:
        parts.append(_gradients(summary))
    rows = [
        f"| `{name}` | {status} | {_plain(remark)} |" for name, status, remark in sorted(_types(summary), key=_name)
    ]
    return "\n\n".join([*parts, "\n".join(["| model type | result | remark |", "|---|---|---|", *rows])])


def _types(summary: Summary) -> Iterable[tuple[str, str, str]]:
    """Name, result and remark of each model type."""
    remarks = summary["parts left"] | dict.fromkeys(summary["by upgrade"], BY_UPGRADE_ONLY) | summary["as far"]
    for name, value in summary["known"].items():
        remarks[name] = f"outputs agree; weights differ by {value:.1e}, because eager scales them to a sum of 1"
    for name, (own, sdpa) in summary["gradients"]["worse"].items():
        remarks[name] = f"error of gradients {own:.1e}, SDPA {sdpa:.1e}"
    for name in summary["agrees"]:
        yield name, "agrees with SDPA" if name in summary["as far"] else "agrees", remarks.get(name, "")
    for reason, names in summary["keeps eager"].items():
        yield from ((name, "keeps eager", reason) for name in names)
    yield from ((name, "refused", _short(_refusal(reason))) for name, reason in summary["refused"].items())
    yield from ((name, "differs", reason) for name, reason in summary["differs"].items())
    for reason, names in summary["not built"].items():
        yield from ((name, "not built", _short(reason)) for name in names)


def _name(row: tuple[str, str, str]) -> str:
    return row[0].casefold()


def _totals(summary: Summary) -> Iterable[tuple[str, int, int]]:
    far = as_far_of(summary)
    counts = summary["counts"] | ({"agrees with SDPA": far} if any(far) else {})
    for status in STATUSES:
        if status in counts:
            count, variants = counts[status]
            if status == "agrees":
                count, variants = count - far[0], variants - far[1]
            yield status, count, variants


def _totals_table(summary: Summary) -> str:
    rows = ["| result | model types | also as a decoder | meaning |", "|---|---:|---:|---|"]
    rows += [
        f"| {status} | {count} | {variants} | {STATUSES[status]} |" for status, count, variants in _totals(summary)
    ]
    return "\n".join(rows)


def _named(summary: Summary) -> Iterable[str]:
    """The model types of the results that need a look."""
    titles = {"refused": "Refused", "differs": "Differs", "as far": "Agrees with SDPA"}
    for part, title in titles.items():
        if summary[part]:
            yield f"{title}: {', '.join(f'`{name}`' for name in sorted(summary[part], key=str.casefold))}."


def _example(summary: Summary) -> Iterable[str]:
    """The parts of a remark with numbers, one by one."""
    for name, remark in summary["as far"].items():
        found = DIFFERENCE.fullmatch(remark)
        if found is None:
            continue
        what, _, padding = found["what"].partition(", ")
        rows = [
            ("part of the remark", "meaning"),
            ("---", "---"),
            (found["route"], "the route by which the model got Clearhead's attention"),
            (found["what"], f"{what} were compared, of an input with {padding or 'no padding'}"),
            (found["value"], "the difference between Clearhead and `eager`"),
            (found["tensor"], "the tensor of the model's output with this difference"),
        ]
        for other in found["others"].split(", "):
            rows.append((other, f"the difference between {OTHERS[other.split()[0]]} and `eager`"))
        yield f"Some remarks have numbers. For example, the remark of `{name}` has these parts:"
        yield "\n".join(f"| {part} | {meaning} |" if part != "---" else "|---|---|" for part, meaning in rows)
        return


def _refusal(reason: str) -> str:
    """The error without advice."""
    return UNSUPPORTED.sub(r"ArgumentError: argument `\1` is not supported", reason)


def _short(text: str) -> str:
    """An error without what is too long for a table."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST].rsplit(' ', 1)[0]} …"
    return text.rstrip(" :")


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


def _plain(text: str) -> str:
    """Texts of errors are not Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
