"""What a look leaves: files that appear whole or not at all, numbers as JSON, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from .._version import __version__
from ..errors import ClearheadError
from ..plot._files import whole_file
from ..plot._ink import NOTE, figure_bytes


@dataclass(frozen=True)
class Outcome:
    """A finished look, made into files and lines on request.

    Args:
        figure: draws the picture, a matplotlib figure.
        page: the HTML.
        as_json: the numbers.
        show: prints to the terminal.
    """

    figure: Callable[[], Any]
    page: Callable[[], str]
    as_json: Callable[[], str]
    show: Callable[[], None]


def deliver(outcome: Outcome, paths: Mapping[str, Path | None], step: Callable[[str], Any]) -> list[Path]:
    """Write the files of an outcome, all of them whole or none.

    Args:
        outcome: what to write.
        paths: ``"png"``, ``"html"`` and ``"json"`` to where, or ``None`` for those that are not wanted.
        step: begins a step of the progress bar.

    Returns:
        The paths that were written.

    Raises:
        ClearheadError: if one of them cannot be written; it names the option.
    """
    makers: dict[str, tuple[str, Callable[[Path], bytes]]] = {
        "png": ("drawing the picture", lambda path: figure_bytes(outcome.figure(), path.suffix.lower()[1:])),
        "html": ("writing the page", lambda _: outcome.page().encode()),
        "json": ("writing the numbers", lambda _: (outcome.as_json() + "\n").encode()),
    }
    files: list[tuple[str, Path, bytes]] = []
    for name, (title, make) in makers.items():
        path = paths[name]
        if path is not None:
            step(title)
            files.append((name, path, make(path)))
    begun, path = "", Path()
    try:
        with ExitStack() as stack:
            for name, path, contents in files:
                begun = name
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(whole_file(path)).write_bytes(contents)
    except (OSError, ValueError) as error:  # a null character in the name is a ValueError
        got = f"{path}: {getattr(error, 'strerror', None) or type(error).__name__}"
        raise ClearheadError(f"--{begun}", expected="a file that can be written", got=got) from error
    return [path for _, path, _ in files]


def as_json(model: str, **fields: Any) -> str:
    """Numbers of a look at a model, in plain ASCII."""
    data = {"clearhead": __version__, "note": NOTE, "model": model, **fields}
    return json.dumps(data, ensure_ascii=True, allow_nan=False)


def rounded(value: float) -> float | None:
    """A number with six decimals; ``None`` for what JSON has no number for."""
    return round(value, 6) if abs(value) < float("inf") else None


def rounded_all(values: Sequence[float]) -> list[float | None]:
    """`rounded` of each."""
    return [rounded(value) for value in values]


def new_console() -> Console:
    """The terminal; one, or a pipe, that is not UTF-8 shows "?" instead of failing."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return Console(highlight=False)


def show_parts(console: Console, *parts: RenderableType) -> None:
    """Print parts with an empty line below each, and at last what weights do not say."""
    for part in (*parts, Text(NOTE, style="dim")):
        console.print(part)
        console.print()
