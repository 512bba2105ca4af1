"""The texts of pages, pictures and the terminal, as they stand in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from clearhead.plot._heads import KINDS
from clearhead.plot._ink import NOTE
from clearhead.plot._sections import TITLES

SAYING = ("say", "_Incomparable")
SOURCES = Path(__file__).parents[2] / "src" / "clearhead"


def texts_of_python() -> Iterator[str]:
    """What `say` and `_Incomparable` are called with; a constant where it is one."""
    for folder in ("plot", "cli"):
        for file in (SOURCES / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SAYING:
                    yield from (
                        part.value
                        for part in node.args[:1]
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    )
    yield NOTE
    yield from TITLES.values()
    yield from KINDS.values()
    for unit, plural in (("patch", "patches"), ("tile", "tiles")):
        kinds = [meaning for kind, meaning in KINDS.items() if kind != "special"]
        yield from (meaning.replace("tokens", plural).replace("token", unit) for meaning in kinds)


def texts_of_scripts() -> Iterator[str]:
    """What `say` is a tag of, with numbers for the values."""
    for file in (SOURCES / "plot").glob("page_*.js"):
        source = file.read_text(encoding="utf-8")
        for start in (found.end() for found in re.finditer(r"\bsay`", source)):
            yield _template(source, start)


def texts_of_page() -> Iterator[str]:
    """What stands in double brackets in the page's HTML."""
    source = (SOURCES / "plot" / "page.html").read_text(encoding="utf-8")
    yield from (" ".join(found.split()) for found in re.findall(r"\[\[(.+?)\]\]", source, flags=re.DOTALL))


def _template(source: str, at: int) -> str:
    """A template from its first character to its closing backtick."""
    text, values = "", 0
    while source[at] != "`":
        if source.startswith("${", at):
            text, values, depth, at = text + f"{{{values}}}", values + 1, 1, at + 2
            while depth:
                depth += {"{": 1, "}": -1}.get(source[at], 0)
                at += 1
        else:
            text, at = text + source[at], at + 1
    return text
