"""`clearhead doctor`: what this machine has, and whether every kernel computes what it should."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..inspection._doctor import examine
from ..inspection._doctor_report import (
    TABLE_TITLE,
    Report,
    dtypes_of,
    failure_lines,
    refusal_lines,
    table_rows,
    verdict,
)

_STYLES = {"ok": "green", "FAIL": "bold red", "refused": "dim"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print versions, threads and kernels, and check each kernel against the reference on this machine.

    Exits with 1 if a check fails.
    """
    console = Console()
    with Console(stderr=True).status("checking every kernel"):
        report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    elif console.is_terminal:
        _print(report, console)
    else:
        typer.echo(str(report))
    if not report.passed:
        raise typer.Exit(1)


def _print(report: Report, console: Console) -> None:
    for title, pairs in (
        ("versions", report.versions),
        ("machine", report.machine),
        ("kernels", {name: "; ".join(reasons) or "available" for name, reasons in report.kernels.items()}),
    ):
        grid = Table.grid(padding=(0, 2))
        for name, value in pairs.items():
            grid.add_row(Text(f"  {name}"), Text(value))
        console.print(Text(title, style="bold"), grid, "", sep="\n")
    table = Table(title=Text(TABLE_TITLE, style="bold"), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("kernel", "call", *dtypes_of(report)):
        table.add_column(heading, no_wrap=True)
    for row in table_rows(report):
        table.add_row(*(Text(text, style=_STYLES.get(text.split()[-1], "")) for text in row))
    console.print(table)
    for title, lines in (("refused", refusal_lines(report)), ("failed", failure_lines(report))):
        if lines:
            console.print("", Text(title, style="bold"), *(Text(f"  {line}") for line in lines), sep="\n")
    if report.warning:
        console.print("", Text(f"warning: {report.warning}", style="yellow"), sep="\n")
    console.print("", Text(verdict(report), style=_STYLES["ok" if report.passed else "FAIL"]), sep="\n")
