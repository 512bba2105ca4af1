"""The commands and their group."""

from __future__ import annotations

from typing import Annotated

import typer

from .._version import __version__
from ._doctor import doctor
from ._errors import OneLineErrors
from ._heads import heads
from ._look import look
from ._walkthrough import walkthrough

main = typer.Typer(
    name="clearhead",
    cls=OneLineErrors,
    help="Multi-head attention that you can see into.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"clearhead {__version__}")
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (look, heads, walkthrough, doctor):
    main.command()(command)
