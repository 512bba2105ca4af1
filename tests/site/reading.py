"""Reads built pages: their text, their links, their anchors."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class Built:
    """What a test reads of a page: the text of its article, where it leads, its anchors, what it loads."""

    text: str = ""
    links: list[str] = field(default_factory=list[str])
    anchors: set[str] = field(default_factory=set[str])
    loaded: list[str] = field(default_factory=list[str])


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.built = Built()
        self.in_article = False
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.built.anchors.add(given["id"])
        if tag == "article":
            self.in_article = True
        if tag in ("script", "style"):
            self.silent += 1
        if tag == "a" and "href" in given:
            self.built.links.append(given["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in given:
            self.built.loaded.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload", "modulepreload"):
            self.built.loaded.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self.in_article = False
        if tag in ("script", "style"):
            self.silent -= 1

    def handle_data(self, data: str) -> None:
        if self.in_article and not self.silent:
            self.built.text += data


def read_built(page: Path) -> Built:
    """Read one page."""
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.built
