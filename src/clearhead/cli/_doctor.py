"""`clearhead doctor`: what this machine has, and whether every kernel computes what it should."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..inspection._doctor import examine, text_of
from ._output import print_with

#: The name of each group is its style.
_STYLES = (
    r"(?m)(?P<bold>^(versions|machine|kernels|refused|failed|checks: .*)$)|(?P<green>\S+ ok\b|^all checks passed.*)|"
    r"(?P<red>\S+ FAIL\b|^checks failed.*)|(?P<yellow>^warning: .*)"
)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Print versions, threads and kernels, and check each kernel against the reference on this machine.

    Exits with 1 if a check fails.
    """
    with Console(stderr=True).status("checking every kernel"):
        report = examine()
    if as_json:
        # JSON has no number for NaN and infinity, which become strings.
        print(json.dumps(json.loads(json.dumps(report), parse_constant=lambda name: str(float(name))), indent=2))
    else:
        text = Text(text_of(report))
        text.highlight_regex(_STYLES)
        print_with(lambda console: console.print(text, soft_wrap=True))
    raise typer.Exit(not report["passed"])
