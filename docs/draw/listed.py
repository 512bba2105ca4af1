"""Writes the tables of commands and of errors into their pages, from the commands' own help and the classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from clearhead import errors
from clearhead.cli import main

DOCS = Path(__file__).parents[1]
COMMANDS, ERRORS = DOCS / "en" / "look.md", DOCS / "en" / "differences.md"
#: The word for the value of an option, by its type.
METAVARS = {str: "TEXT", int: "NUMBER", Path: "PATH"}


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between the markers of a name."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    return page.split(start)[0] + f"{start}\n{text}\n\n{end}" + page.split(end)[1]


def _row(parameter: inspect.Parameter, hint: Any) -> str:
    """One argument or option of a command: its names, its help, its default."""
    kind, info = get_args(hint)
    if isinstance(info, ArgumentInfo):
        name = parameter.name.upper()
    else:
        given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        name = ", ".join(given or [f"--{parameter.name.replace('_', '-')}"])
        takes = next(each for each in (*get_args(kind), kind) if each is not type(None))
        name += "" if takes is bool else f" {info.metavar or METAVARS[takes]}"
    default = info.show_default if isinstance(info.show_default, str) else parameter.default
    shown = "" if default is None or isinstance(default, bool) or info.show_default is False else str(default)
    return f"| `{name}` | {info.help} | {shown} |"


def commands() -> Iterator[tuple[str, str]]:
    """Every command, and its help and options as text."""
    for command in main.registered_commands:
        function: Any = command.callback
        hints = get_type_hints(function, include_extras=True)
        rows = [_row(parameter, hints[name]) for name, parameter in inspect.signature(function).parameters.items()]
        table = "\n".join(["| argument or option | what it does | default |", "|---|---|---|", *rows])
        yield function.__name__, f"{inspect.cleandoc(function.__doc__)}\n\n{table}"


def with_commands(page: str) -> str:
    """The page with the help of every command between its markers."""
    for name, text in commands():
        page = between(page, name, text)
    return page


def with_errors(page: str) -> str:
    """The page with every error and warning between its markers."""
    rows = ["| class | also a | raised or warned if |", "|---|---|---|"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        if issubclass(kind, errors.ClearheadError):
            others = [base.__name__ for base in kind.__mro__[1:] if base.__module__ == "builtins"]
            own = [other for other in others if other not in ("Exception", "BaseException", "object", "LookupError")]
        else:
            own = ["UserWarning"]
        meaning = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        rows.append(f"| `{name}` | {', '.join(f'`{each}`' for each in own)} | {meaning} |")
    return between(page, "errors", "\n".join(rows))
