"""Reads built pages: their text, their links, their anchors."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import NamedTuple

from tests.plot.pages import Elements

LOADING = ("stylesheet", "icon", "preconnect", "preload", "modulepreload")


class Built(NamedTuple):
    """What a test reads of a page: the text of its article, where it leads, its anchors, what it loads."""

    text: str
    links: list[str]
    anchors: set[str]
    loaded: list[str]


def read_built(page: Path) -> Built:
    """Read one page."""
    source = page.read_text(encoding="utf-8")
    article = "".join(re.findall(r"<article.*?</article>", source, re.DOTALL))
    text = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", "", article, flags=re.DOTALL)
    tags = [(tag, {name: value or "" for name, value in given.items()}) for tag, given in Elements(source).tags]
    links = [given["href"] for tag, given in tags if tag == "a" and "href" in given]
    anchors = {given["id"] for _, given in tags if "id" in given}
    loaded = [given["src"] for tag, given in tags if tag in ("img", "script", "iframe", "source") and "src" in given]
    loaded += [given["href"] for tag, given in tags if tag == "link" and given.get("rel") in LOADING]
    return Built(html.unescape(text), links, anchors, loaded)
