"""The names in a script, read token by token, because no test needs Node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<name>[A-Za-z_$][\w$]*)
      | (?P<value>\d[\w.]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<sign>\.\.\.|\?\.(?!\d)|=>|.)""",
    re.DOTALL | re.VERBOSE,
)
PATTERN = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n[])+/[a-z]*")
TEMPLATE = re.compile(r"(?:\\.|(?!\$\{)[^`\\])*(`|\$\{)", re.DOTALL)
#: After these signs and words a slash begins a regular expression, after anything else it divides.
BEFORE_PATTERN = {*"(,=:[!&|?{};", "=>", "return", ""}


def tokens(source: str) -> Iterator[tuple[str, str]]:
    """Kind (name, value or sign) and text; each part of a template between its ``${…}`` is a value."""
    at, before = 0, ""
    braces: list[int] = []  # open in the values of templates, innermost last
    while at < len(source):
        found = TOKEN.match(source, at)
        assert found
        kind, text = str(found.lastgroup), found[0]
        if text == "/" and before in BEFORE_PATTERN:
            found, kind = PATTERN.match(source, at), "value"
        elif text == "`" or (text == "}" and braces and not braces[-1]):
            found, kind = TEMPLATE.match(source, at + 1), "value"
            assert found
            braces = braces[: len(braces) - (text == "}")] + [0] * (found[1] == "${")
        elif text in "{}" and braces:
            braces[-1] += 1 if text == "{" else -1
        assert found
        at = found.end()
        if kind != "blank":
            before = "" if found[0].endswith("${") else text
            yield kind, text


def names(source: str) -> set[str]:
    """The names that are neither properties nor keys, and no part of a text or comment."""
    read = [("sign", ";"), *tokens(source), ("sign", ";")]
    return {
        name
        for ((_, before), (kind, name)), (_, (_, after)) in pairwise(pairwise(read))
        if kind == "name" and before not in (".", "?.") and not (before in ("{", ",") and after == ":")
    }
