"""The doctor's report, and its text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import inf, isnan
from typing import Any, Literal

TABLE_TITLE = "checks: largest error of outputs and gradients against the reference in float64, on the CPU"


@dataclass(frozen=True)
class Measure:
    """One error and its limit, both relative to the largest entry of the exact result."""

    error: float
    limit: float

    @property
    def within(self) -> bool:
        return self.error <= self.limit

    @property
    def share(self) -> float:
        """How much of the limit the error uses up; infinite for NaN."""
        if isnan(self.error):
            return inf
        return self.error / self.limit if self.limit else (0.0 if self.error == 0 else inf)


@dataclass(frozen=True)
class Check:
    """One kernel on one call in one dtype.

    Args:
        kernel: its name.
        case: name of the call.
        dtype: ``"float32"``.
        status: ``"ok"``, ``"failed"``, or ``"refused"`` by the kernel itself.
        output: error of the output; ``None`` if nothing was computed.
        gradient: the worst error among the gradients of all inputs; ``None`` if the kernel refused them, and the
            output was computed as for inference.
        worst_gradient: the input it belongs to.
        reasons: why the kernel refused the call or its gradients, or the error it died of.
    """

    kernel: str
    case: str
    dtype: str
    status: Literal["ok", "failed", "refused"]
    output: Measure | None = None
    gradient: Measure | None = None
    worst_gradient: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Findings of `examine`. ``str()`` gives them as text.

    Args:
        versions: of Clearhead, Python, PyTorch and the optional packages.
        machine: platform, processor, accelerators and threads.
        kernels: each kernel's reasons against a plain call; empty if it is available.
        checks: every kernel × call × dtype.
        warning: versions of PyTorch or Python that Clearhead is not tested with, in a line; empty if there are none.
    """

    versions: dict[str, str]
    machine: dict[str, str]
    kernels: dict[str, tuple[str, ...]]
    checks: tuple[Check, ...]
    warning: str = ""

    @property
    def passed(self) -> bool:
        """Whether no check failed; a refusal is no failure."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "failed")

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values; an error that is not a finite number becomes a string."""
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda name: str(float(name)))
        return {"passed": self.passed, **values}

    def __str__(self) -> str:
        """Versions, machine, kernels, the table of checks, and what there is to say about it."""
        lines = ["versions", *_pairs(self.versions), "", "machine", *_pairs(self.machine), "", "kernels"]
        lines += _pairs({name: "; ".join(reasons) or "available" for name, reasons in self.kernels.items()})
        rows = _table_rows(self)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += ["", TABLE_TITLE]
        for row in rows:
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
        for title, found in (("refused", _refusal_lines(self)), ("failed", _failure_lines(self))):
            if found:
                lines += ["", title, *(f"  {line}" for line in found)]
        if self.warning:
            lines += ["", f"warning: {self.warning}"]
        return "\n".join([*lines, "", _verdict(self)])


def _table_rows(report: Report) -> list[tuple[str, ...]]:
    """A heading, then a row per kernel and call: both names and a cell per dtype, ``-`` where it was not computed."""
    dtypes = tuple(dict.fromkeys(check.dtype for check in report.checks))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for check in report.checks:
        rows.setdefault((check.kernel, check.case), {})[check.dtype] = _cell(check)
    found = [(*place, *(cells.get(dtype, "-") for dtype in dtypes)) for place, cells in rows.items()]
    return [("kernel", "call", *dtypes), *found]


def _cell(check: Check) -> str:
    """``3.1e-07 ok`` or ``2.0e-03 FAIL``: of output and gradient the error that uses up more of its limit."""
    word = "FAIL" if check.status == "failed" else check.status
    measures = [measure for measure in (check.output, check.gradient) if measure is not None]
    return f"{max(measures, key=lambda measure: measure.share).error:.1e} {word}" if measures else word


def _refusal_lines(report: Report) -> list[str]:
    """Refused calls and reasons of each kernel. Calls with the same reasons share one line."""
    dtypes: dict[tuple[str, str, str, str], list[str]] = {}
    for check in report.checks:
        only_gradients = check.output is not None and check.gradient is None
        if check.status == "refused" or only_gradients:
            what = "gradients of " if only_gradients else ""
            dtypes.setdefault((check.kernel, what, "; ".join(check.reasons), check.case), []).append(check.dtype)
    computed: dict[str, dict[str, None]] = {}  # case → dtypes, in order
    for check in report.checks:
        computed.setdefault(check.case, {})[check.dtype] = None
    cases: dict[tuple[str, str, str, str], list[str]] = {}
    for (kernel, what, reasons, case), which in dtypes.items():
        some = "" if which == list(computed[case]) else f" in {' and '.join(which)}"
        cases.setdefault((kernel, what, some, reasons), []).append(case)
    return [
        f"{kernel} refuses {what}{', '.join(which)}{some}: {reasons}"
        for (kernel, what, some, reasons), which in cases.items()
    ]


def _failure_lines(report: Report) -> list[str]:
    """Failed calls, and their errors."""
    lines: list[str] = []
    for check in report.failures:
        said = list(check.reasons) if check.output is None else []
        for what, measure in (("output", check.output), (f"gradient of {check.worst_gradient}", check.gradient)):
            if measure is not None and not measure.within:
                said.append(f"error of the {what} {measure.error:.1e}, allowed {measure.limit:.1e}")
        lines.append(f"{check.kernel}, {check.case}, {check.dtype}: {'; '.join(said)}")
    return lines


def _verdict(report: Report) -> str:
    """One line: how many checks passed, were refused, failed."""
    count = {status: sum(check.status == status for check in report.checks) for status in ("ok", "refused", "failed")}
    numbers = f"{count['ok']} ok, {count['refused']} refused, {count['failed']} failed"
    if report.passed:
        return f"all checks passed: {numbers}"
    return f"checks failed: {numbers}. Avoid the failed kernels with clearhead.use_kernel(...), and please report this."


def _pairs(pairs: dict[str, str]) -> list[str]:
    width = max(map(len, pairs))
    return [f"  {name.ljust(width)}  {value}" for name, value in pairs.items()]
