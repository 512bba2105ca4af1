"""What a look leaves: files that appear whole or not at all, and what is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ClearheadError


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
    """Write the files of an outcome, all of them or none.

    Args:
        outcome: what to write.
        paths: ``"png"``, ``"html"`` and ``"json"`` to where, or ``None`` for those that are not wanted.
        step: begins a step of the progress bar.

    Returns:
        The paths that were written.

    Raises:
        ClearheadError: if one of them cannot be written.
    """
    makers: dict[str, Callable[[], bytes]] = {
        "png": lambda: _picture(outcome.figure(), paths["png"]),
        "html": lambda: outcome.page().encode(),
        "json": lambda: (outcome.as_json() + "\n").encode(),
    }
    files: dict[str, tuple[Path, bytes]] = {}
    for name, title in (("png", "drawing the picture"), ("html", "writing the page"), ("json", "writing the numbers")):
        path = paths[name]
        if path is not None:
            step(title)
            files[f"--{name}"] = (path, makers[name]())
    write_whole(files)
    return [path for path, _ in files.values()]


def write_whole(files: Mapping[str, tuple[Path, bytes]]) -> None:
    """Write files so that all of them appear whole, or none does.

    Args:
        files: option that named a file → its path and contents.

    Raises:
        ClearheadError: if one of them cannot be written; it names the option.
    """
    from ..plot._files import whole_file

    begun, path = "", Path()
    try:
        with ExitStack() as stack:
            for option, (path, contents) in files.items():
                begun = option
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(whole_file(path)).write_bytes(contents)
    except (OSError, ValueError) as error:  # a null character in the name is a ValueError
        got = f"{path}: {getattr(error, 'strerror', None) or type(error).__name__}"
        raise ClearheadError(begun, expected="a file that can be written", got=got) from error


def _picture(figure: Any, path: Path | None) -> bytes:
    from ..plot._ink import figure_bytes

    return figure_bytes(figure, "png" if path is None else path.suffix.lower()[1:])
