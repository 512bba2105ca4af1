"""Where long code may continue on the next line: after the signs between its words, never inside one."""

from __future__ import annotations

import html
import re

#: What has no space in it and is not longer stays on one line.
LONGEST_WHOLE = 20
WHOLE = re.compile(r"<(pre|script|style|svg)\b.*?</\1>", re.DOTALL)
CODE = re.compile(
    r'(<code[^>]*>|<h1[^>]*>|<span class="doc doc-object-name[^>]*>)(.*?)(</code>|</h1>|</span>)', re.DOTALL
)
TAG = re.compile(r"(<[^>]*>)")
UNSPACED = re.compile(r"\S+")
BREAK = re.compile(r"(?<=\w)((?:[._/=:\\-]|&amp;|\()+)(?=\w)")


def with_breaks(page: str) -> str:
    """A built page with places to break in its long inline code and in the names of the reference."""
    parts: list[str] = []
    start = 0
    for whole in WHOLE.finditer(page):
        parts += [CODE.sub(_broken, page[start : whole.start()]), whole[0]]
        start = whole.end()
    return "".join([*parts, CODE.sub(_broken, page[start:])])


def _broken(found: re.Match[str]) -> str:
    opening, inside, closing = found.groups()
    pieces = TAG.split(inside)  # text and tags in turn
    pieces[::2] = [UNSPACED.sub(_with_places, text) for text in pieces[::2]]
    return opening + "".join(pieces) + closing


def _with_places(found: re.Match[str]) -> str:
    is_long = len(html.unescape(found[0])) > LONGEST_WHOLE
    return BREAK.sub(r"\1<wbr>", found[0]) if is_long else found[0]
