"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.writing import ratio, significant, table

from .results import OURS, Result

__all__ = ["grid", "markdown", "remarks"]

#: Up to this share of the processors' time, other programs are taken for the system's own.
QUIET = 0.05
#: A ceiling that Clearhead exceeds by more is none: the product behind it is slow on this machine.
MOST = 1.5

Grid = tuple[list[str], list[list[str]]]


def markdown(results: list[Result]) -> str:
    """One table per section, then remarks about the figures."""
    parts: list[str] = []
    for section in sections(results):
        header, rows = grid(section)
        memory = ", memory" if section[0].unit == "MB" else ""
        parts += [f"### {section[0].section}{memory}", table(header, rows, left=header.index(_ours(section)))]
    lines = [f"* {line}" for line in remarks(results)]
    return "\n\n".join([*parts, "### Remarks on these figures", "\n".join(lines)])


def sections(results: list[Result]) -> list[list[Result]]:
    """Results of one section together, in order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result.section, result.unit), []).append(result)
    return list(found.values())


def grid(section: list[Result]) -> Grid:
    """One line per result: the kernel, Clearhead's figure, other ways' ratios to it, and its share of the ceiling.

    Results without a kernel, such as those of whole models, have no column for it.
    """
    names = list(dict.fromkeys(name for result in section for name in result.ratios))
    with_kernel = any(result.kernel for result in section)
    header = ["work", *(["kernel"] if with_kernel else []), _ours(section), *names]
    rows = []
    for result in section:
        kernel = [result.kernel or "–"] if with_kernel else []
        ratios = [ratio(result.ratios[name]) if name in result.ratios else "–" for name in names]
        rows.append([result.name, *kernel, significant(result.figures[OURS]), *ratios])
    if any(result.rates for result in section):
        header.append(f"{OURS}, {section[0].rate_unit}")
        for row, result in zip(rows, section, strict=True):
            row.append(f"{result.rates[OURS]:.0f}" if OURS in result.rates else "–")
    shares = [result.share if (result.share or 0.0) <= MOST else None for result in section]
    if any(share is not None for share in shares):
        header.append("share of the ceiling")
        for row, share in zip(rows, shares, strict=True):
            row.append("–" if share is None else f"{share:.0%}")
    return header, rows


def _ours(section: list[Result]) -> str:
    """Title of the column of Clearhead's own figures."""
    return f"{OURS}, {section[0].unit}"


def remarks(results: Iterable[Result]) -> list[str]:
    """Results that differ, work measured under load, and the ways that were not measured, with the reason."""
    results = list(results)
    lines = []
    for result in results:
        for name, value in result.wrong.items():
            lines.append(
                f"DIFFERENT RESULT: {result.work}: {name} is {value:.1e} away, tolerance {result.tolerance:.0e}"
            )
    for tolerance in sorted({result.tolerance for result in results if result.differences}):
        close = [
            (value, result.work)
            for result in results
            if result.tolerance == tolerance
            for value in result.differences.values()
        ]
        largest, work = max(close)
        lines.append(
            f"Largest difference between two results where {tolerance:.0e} is allowed: {largest:.1e}, in `{work}`"
        )
    for result in results:
        if result.load is not None and result.load > QUIET:
            lines.append(f"NOT QUIET: other programs took {result.load:.0%} of the processors in `{result.work}`")
    together: dict[str, list[str]] = {}
    missing: dict[tuple[str, str], dict[str, list[str]]] = {}
    for result in results:
        together.setdefault(result.section, []).append(result.name)
        for name, reason in result.skipped.items():
            missing.setdefault((name, reason), {}).setdefault(result.section, []).append(result.name)
    for (name, reason), works in missing.items():
        where = ", ".join(f"`{section} ({_shortened(names, together[section])})`" for section, names in works.items())
        lines.append(f"{name} not measured, because {reason}: {where}")
    return lines


def _shortened(names: list[str], every: list[str]) -> str:
    """Some lines of a section: all, those that share a word that no other line has, or each by its name."""
    if len(names) < 2:
        return " / ".join(names)
    others = [name for name in every if name not in names]
    if not others:
        return "all"
    for word in names[0].split(", "):
        if all(word in name.split(", ") for name in names) and not any(word in name.split(", ") for name in others):
            return f"all with {word}"
    return " / ".join(names)
