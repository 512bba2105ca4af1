"""Reads the pages: text without code, headings, anchors, links. The tests and the build of the site use it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^( *)```.*?^ *```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(#+) +(.+?) *$", re.MULTILINE)
#: The line before a heading whose anchor differs from the one that its words make: Chinese pages keep the English one.
GIVEN = re.compile(r'^<a id="([\w-]+)"></a>\n+(?=#)', re.MULTILINE)


class Heading(NamedTuple):
    """A heading of a page: how many ``#`` it has, its words, its anchor."""

    level: int
    words: str
    anchor: str


def text_of(page: Path) -> str:
    """The page without its code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def headings(page: Path) -> list[Heading]:
    """Every heading of a page with its anchor: the given one, else the one that GitHub makes from the words."""
    text = text_of(page)
    given = {found.end(): found[1] for found in GIVEN.finditer(text)}
    listed: list[Heading] = []
    counts: dict[str, int] = {}
    for found in HEADING.finditer(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found[2]).replace("`", "")
        anchor = given.get(found.start()) or re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = counts.get(anchor, 0)
        counts[anchor] = count + 1
        listed.append(Heading(len(found[1]), words, f"{anchor}-{count}" if count else anchor))
    return listed


def anchors(page: Path) -> set[str]:
    """Every anchor of a page."""
    return {heading.anchor for heading in headings(page)}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Every fenced block of a page: its language and its text."""
    text = page.read_text(encoding="utf-8")
    return [
        (found[1], found[2])
        for found in re.finditer(r"^ *```([^\n]*)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    ]
