"""The output of a look: files that appear whole or not at all, JSON, and lines on the terminal."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console, RenderableType
from rich.text import Text
from torch import Tensor

from .._version import __version__
from ..errors import ClearheadError
from ..plot._files import whole_file
from ..plot._fonts import drawable_language, figure_bytes
from ..plot._heads import HeadSummary
from ..plot._html import Page
from ..plot._ink import NOTE
from ..plot._language import say
from ..plot._terminal import overview
from ._choice import Numbers
from ._errors import warn


@dataclass(frozen=True)
class Look:
    """A finished look, before anything of it is drawn.

    Args:
        model: its name.
        modules: names of the layers.
        place: layer and head of the large head.
        summaries: layer → head.
        numbers: the statistic of the overview. Default: the mean entropy.
        columns: name → layer → head → entry of the JSON.
        fields: other entries of the JSON. Tensors become lists.
        facts: a few lines about the run.
        findings: what the large head shows, in a line or two, and what all heads do.
        details: from the console to the lines about the large head.
        figure: draws the matplotlib figure.
        page: makes the HTML page.
        unit: what heads attend to.
        warnings: printed after everything else.
    """

    model: str
    modules: Sequence[str]
    place: tuple[int, int]
    summaries: Sequence[Sequence[HeadSummary]]
    numbers: Numbers | None
    columns: Mapping[str, Sequence[Sequence[Any] | Tensor]]
    fields: Mapping[str, Any]
    facts: RenderableType
    findings: Sequence[RenderableType]
    details: Callable[[Console], Iterable[RenderableType]]
    figure: Callable[[], Any]
    page: Callable[[], Page]
    unit: str = "token"
    warnings: Sequence[str] = ()

    def as_json(self) -> str:
        """All numbers, in plain ASCII; the pages of `docs/` describe the fields."""
        heads = [
            {"layer": layer, "head": head, "module": module}
            | {name: values[layer][head] for name, values in self.columns.items()}
            for layer, module in enumerate(self.modules)
            for head in range(len(self.summaries[layer]))
        ]
        chosen = {"layer": self.place[0], "head": self.place[1]}
        data = {"note": NOTE, "model": self.model, **self.fields, "chosen": chosen, "heads": heads}
        return json.dumps({"clearhead": __version__, **_rounded(data)}, ensure_ascii=True, allow_nan=False)

    def show(self, console: Console) -> None:
        """Print the finding, what heads do, the large head, and the overview of all heads with its codes."""
        every = overview(self.summaries, numbers=self.numbers, chosen=self.place, width=console.width, unit=self.unit)
        note = Text(say(NOTE), style="dim")
        for part in (self.facts, *self.findings, *self.details(console), every, note):
            console.print(part)
            console.print()


def require_writable(paths: Mapping[str, Path | None]) -> None:
    """Raise `ClearheadError` for a file that certainly cannot be written, before there is anything to write."""
    for name, path in paths.items():
        if path is None:
            continue
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir():
            raise _unwritable(name, path, os.strerror(errno.EISDIR))
        if not folder.is_dir():
            raise _unwritable(name, path, os.strerror(errno.ENOTDIR))
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise _unwritable(name, path, os.strerror(errno.EACCES))


def warn_of_link(address: str | None, page: Path | None, command: str) -> None:
    """Warn of the address of a file that does not lie beside a page yet; `command` would write it."""
    parts = urlsplit(address or "")
    if page is not None and parts.path and not (parts.scheme or parts.netloc):
        target = page.parent / unquote(parts.path)
        if not target.exists():
            warn(f"--link: the link will work once {target} is there; {command} --html {target} writes it.")


def deliver(look: Look, paths: Mapping[str, Path | None], step: Callable[[str], Any]) -> list[Path]:
    """Write all files of a look, or none; return their paths.

    `paths` has a path or ``None`` for ``"png"``, ``"html"`` and ``"json"``. `step` begins a step of the progress bar.
    An error names the option of the file.
    """
    makers: dict[str, tuple[str, Callable[[Path], bytes]]] = {
        "png": (say("drawing the picture"), partial(_picture, look)),
        "html": (say("writing the page"), lambda _: look.page().text.encode()),
        "json": (say("writing the numbers"), lambda _: (look.as_json() + "\n").encode()),
    }
    files: list[tuple[str, Path, bytes]] = []
    for name, (title, make) in makers.items():
        path = paths[name]
        if path is not None:
            step(title)
            files.append((name, path, make(path)))
    return write_files(files)


def write_files(files: Sequence[tuple[str, Path, bytes]]) -> list[Path]:
    """Write files, each by the name of its option, its path and its contents: all of them, or none."""
    begun, path = "", Path()
    try:
        with ExitStack() as stack:
            for begun, path, contents in files:  # noqa: B007
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(whole_file(path)).write_bytes(contents)
    except (OSError, ValueError) as error:  # a null character in the name is a ValueError
        raise _unwritable(begun, path, getattr(error, "strerror", None) or type(error).__name__) from error
    return [path for _, path, _ in files]


def _picture(look: Look, path: Path) -> bytes:
    with drawable_language():
        return figure_bytes(look.figure(), path.suffix.lower()[1:], warn)


def _unwritable(name: str, path: Path, reason: str) -> ClearheadError:
    return ClearheadError(f"--{name}", expected="a file that can be written", got=f"{path}: {reason}")


def print_with(show: Callable[[Console], None]) -> None:
    """Print at once what a function prints on the console that it is given."""
    console = Console(highlight=False)
    with console.capture() as printed:
        show(console)
    print(printed.get(), end="")


def _rounded(value: Any) -> Any:
    """Numbers with six decimals, ``None`` for those that JSON has none for; in lists and tensors too."""
    if isinstance(value, float):
        return round(value, 6) if abs(value) < float("inf") else None
    if isinstance(value, Tensor):
        return _rounded(value.tolist())
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
