"""Result files and the figures on the pages: every figure stands between markers and comes from a result file.

    python -m benchmarks.figures

fills every page from the kept results, without measuring. ``<!-- NAME.what -->text<!-- /NAME.what -->`` holds the text
`what` of benchmarks/results/NAME.json. The function ``texts`` of the benchmark makes the texts of a result file,
``pictures`` its pictures, if it has some. A text that stands alone has empty lines around it. Within a sentence no
marker begins a line: Markdown would take it for HTML.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

__all__ = [
    "MARKED",
    "RESULTS",
    "ROOT",
    "Kept",
    "command_of",
    "fill_pages",
    "filled",
    "module_of",
    "pages",
    "pictures_of",
    "read",
    "texts_of",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: What was measured, by the name of the line that was measured; plain data.
Figures = dict[str, Any]
MARKED = re.compile(
    r"<!-- (?P<file>[a-z_]+)\.(?P<what>[a-z0-9-]+) -->(?P<text>.*?)<!-- /(?P=file)\.(?P=what) -->", re.S
)


@final
@dataclass(frozen=True)
class Kept:
    """A result file.

    Args:
        machine: processor and threads.
        date: the day on which the run began, as 2026-11-23.
        versions: of the libraries.
        command: that measures it all again.
        figures: plain data, by line.
    """

    machine: str
    date: str
    versions: str
    command: str
    figures: Figures

    def write(self, path: Path) -> None:
        """Write JSON with one line of text for each line that was measured."""
        path.parent.mkdir(parents=True, exist_ok=True)
        about = [_pair(name, getattr(self, name)) for name in ("machine", "date", "versions", "command")]
        lines = ",\n".join(f"  {_pair(name, _rounded(value))}" for name, value in self.figures.items())
        figures = f'"figures": {{\n{lines}\n }}'
        path.write_text("{\n " + ",\n ".join([*about, figures]) + "\n}\n", encoding="utf-8")

    @property
    def texts(self) -> dict[str, str]:
        """What every result file can say about itself."""
        measured = f"Measured on {self.machine}, with {self.versions}, on {self.date}, by `{self.command}`."
        about = {"machine": self.machine, "date": self.date, "versions": self.versions}
        return about | {"command": f"`{self.command}`", "measured": measured}


def module_of(name: str) -> str:
    """The module of a benchmark: that of a folder, ``benchmarks.cpu.__main__``, or a file, ``benchmarks.cpu.decoding``.

    Raises:
        ValueError: unless there is exactly one.
    """
    folder = ROOT / "benchmarks"
    found = [*folder.glob(f"{name}/__main__.py"), *folder.glob(f"*/{name}.py")]
    if len(found) != 1:
        raise ValueError(f"expected one benchmark of the name {name}, got {[str(path) for path in found]}")
    return ".".join(found[0].relative_to(ROOT).with_suffix("").parts)


def command_of(name: str) -> str:
    """What stands behind ``python -m`` for a benchmark: ``benchmarks.cpu``, or ``benchmarks.cpu.decoding``."""
    return module_of(name).removesuffix(".__main__")


def differing(figures: Figures, tolerance: Callable[[str], float]) -> list[str]:
    """The lines whose two results differ by more than a line's tolerance, in words."""
    return [
        f"{line}: the results differ by {found['difference']:.1e}"
        for line, found in figures.items()
        if found["difference"] > tolerance(line)
    ]


def read(path: Path) -> Kept:
    """Read a result file."""
    return Kept(**json.loads(path.read_text(encoding="utf-8")))


def texts_of(name: str, kept: Kept) -> dict[str, str]:
    """Every text of a benchmark's result file, by what it says."""
    return kept.texts | importlib.import_module(module_of(name)).texts(kept.figures)


def pictures_of(name: str) -> dict[Path, str]:
    """The SVG pictures of a benchmark's kept results."""
    draw = getattr(importlib.import_module(module_of(name)), "pictures", None)
    return {} if draw is None else draw(read(RESULTS / f"{name}.json").figures)


def pages() -> list[Path]:
    """The pages that may hold figures."""
    return [*sorted(ROOT.glob("README*.md")), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: str) -> tuple[str, list[str]]:
    """The page with the texts of the kept results, and what is wrong with markers that were left as they are."""
    wrong: list[str] = []

    def replace(found: re.Match[str]) -> str:
        name, what = found["file"], found["what"]
        if not (RESULTS / f"{name}.json").exists():
            wrong.append(f"{name}.{what}: there is no benchmarks/results/{name}.json")
            return found[0]
        try:
            text = _kept_texts(name)[what]
        except KeyError as missing:
            wrong.append(f"{name}.{what}: benchmarks/results/{name}.json does not have {missing}")
            return found[0]
        text = f"\n\n{text}\n\n" if "\n" in found["text"] + text else text
        return f"<!-- {name}.{what} -->{text}<!-- /{name}.{what} -->"

    return MARKED.sub(replace, page), wrong


def fill_pages() -> Iterator[Path]:
    """Write the kept figures into every page and draw their pictures; gives the files that have changed.

    Raises:
        SystemExit: at the end, if there was no text for some marker.
    """
    _kept_texts.cache_clear()
    contents: dict[Path, str] = {}
    wrong: list[str] = []
    for page in pages():
        contents[page], found = filled(page.read_text(encoding="utf-8"))
        wrong += found
    for path in _result_files():
        try:
            contents |= pictures_of(path.stem)
        except KeyError as missing:
            wrong.append(f"{path.name}: its pictures need the line {missing}")
    for path, content in contents.items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            yield path
    if wrong:
        raise SystemExit("\n".join(wrong))


def _result_files() -> list[Path]:
    return sorted(RESULTS.glob("*.json"))


@cache
def _kept_texts(name: str) -> dict[str, str]:
    return texts_of(name, read(RESULTS / f"{name}.json"))


def _pair(name: str, value: Any) -> str:
    return f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _rounded(value: Any) -> Any:
    """Four digits that count of every figure: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value


def main() -> None:
    for path in fill_pages():
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
