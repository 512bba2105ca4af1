"""The doctor's report as plain text, and the sentences that its other forms share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._doctor import Check, Report

__all__ = [
    "TABLE_TITLE",
    "cell",
    "dtypes_of",
    "failure_lines",
    "refusal_lines",
    "table_rows",
    "verdict",
    "write_report",
]

TABLE_TITLE = "checks: largest error of outputs and gradients against the reference in float64, on the CPU"


def write_report(report: Report) -> str:
    """Write versions, machine, kernels, the table of checks, and what there is to say about it."""
    lines = ["versions", *_pairs(report.versions), "", "machine", *_pairs(report.machine), "", "kernels"]
    lines += _pairs({name: "; ".join(reasons) or "available" for name, reasons in report.kernels.items()})
    rows = [("kernel", "call", *dtypes_of(report)), *table_rows(report)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["", TABLE_TITLE]
    lines += [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for title, found in (("refused", refusal_lines(report)), ("failed", failure_lines(report))):
        if found:
            lines += ["", title, *(f"  {line}" for line in found)]
    if report.warning:
        lines += ["", f"warning: {report.warning}"]
    return "\n".join([*lines, "", verdict(report)])


def dtypes_of(report: Report) -> tuple[str, ...]:
    """The dtypes that were checked, in order."""
    return tuple(dict.fromkeys(check.dtype for check in report.checks))


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """One row per kernel and call: both names, then a cell per dtype; ``-`` for dtypes it was not computed in."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for check in report.checks:
        rows.setdefault((check.kernel, check.case), {})[check.dtype] = cell(check)
    return [(*place, *(cells.get(dtype, "-") for dtype in dtypes_of(report))) for place, cells in rows.items()]


def cell(check: Check) -> str:
    """``3.1e-07 ok`` or ``2.0e-03 FAIL``: of output and gradient the error that uses up more of its limit."""
    word = "FAIL" if check.status == "failed" else check.status
    measures = [measure for measure in (check.output, check.gradient) if measure is not None]
    return f"{max(measures, key=lambda measure: measure.share).error:.1e} {word}" if measures else word


def refusal_lines(report: Report) -> list[str]:
    """What each kernel refused, and why: one line for all the calls that it refused for the same reasons."""
    dtypes: dict[tuple[str, str, str, str], list[str]] = {}
    for check in report.checks:
        only_gradients = check.output is not None and check.gradient is None
        if check.status == "refused" or only_gradients:
            what = "gradients of " if only_gradients else ""
            dtypes.setdefault((check.kernel, what, "; ".join(check.reasons), check.case), []).append(check.dtype)
    computed: dict[str, list[str]] = {}
    for check in report.checks:
        computed.setdefault(check.case, [])
        if check.dtype not in computed[check.case]:
            computed[check.case].append(check.dtype)
    cases: dict[tuple[str, str, str, str], list[str]] = {}
    for (kernel, what, reasons, case), which in dtypes.items():
        some = "" if which == computed[case] else f" in {' and '.join(which)}"
        cases.setdefault((kernel, what, some, reasons), []).append(case)
    return [
        f"{kernel} refuses {what}{', '.join(which)}{some}: {reasons}"
        for (kernel, what, some, reasons), which in cases.items()
    ]


def failure_lines(report: Report) -> list[str]:
    """What failed, by how much."""
    lines: list[str] = []
    for check in report.failures:
        said = list(check.reasons) if check.output is None else []
        for what, measure in (("output", check.output), (f"gradient of {check.worst_gradient}", check.gradient)):
            if measure is not None and not measure.within:
                said.append(f"error of the {what} {measure.error:.1e}, allowed {measure.limit:.1e}")
        lines.append(f"{check.kernel}, {check.case}, {check.dtype}: {'; '.join(said)}")
    return lines


def verdict(report: Report) -> str:
    """One line: how many checks passed, were refused, failed."""
    count = {status: sum(check.status == status for check in report.checks) for status in ("ok", "refused", "failed")}
    numbers = f"{count['ok']} ok, {count['refused']} refused, {count['failed']} failed"
    if report.passed:
        return f"all well: {numbers}"
    return f"not well: {numbers}. Avoid the failed kernels with clearhead.use_kernel(...), and please report this."


def _pairs(pairs: dict[str, str]) -> list[str]:
    width = max(map(len, pairs))
    return [f"  {name.ljust(width)}  {value}" for name, value in pairs.items()]
